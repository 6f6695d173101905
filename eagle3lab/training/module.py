"""`Eagle3Module`: the draft, its training step over whole updates, and its validation step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from eagle3lab.config.schema import Normalisation, OptimConfig
from eagle3lab.data.noise import TransformTensors
from eagle3lab.draft.pruned.heads import LossAndGradient
from eagle3lab.draft.pruned.plan import PLAN
from eagle3lab.draft.pruned.step import pruned_forward
from eagle3lab.draft.ttt import LossRecorder, TTTOutput, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.weights import EdgeWeights

from . import checkpoint_state
from .loader import DOMAIN, stays_on_host
from .loss_weights import Weights, loss_weights
from .metrics import Sums, train_sums, train_widths, validation_widths
from .noise_seed import pack_seed
from .optim import apply_settings, build_learning_rate, build_optimizers, set_learning_rate, settings_of
from .run_plan import PlannedUpdate, RunPlan
from .sharding import ShardedStrategy, whole
from .validation import pack_sums
from .weight_average import WeightAverage


class Eagle3Module(LightningModule):
    """An EAGLE-3 draft in training.

    Optimisation is manual because an update is the plan's, not a fixed number of batches: the last update of
    an epoch may hold fewer packs, and its loss must still be the mean over what it holds.

    Args:
        draft: `Eagle3DraftModel` with fp32 parameters, frozen ones not requiring a gradient.
        plan: every update of the run.
        supervised_counts: per-step supervised tokens of a row, `dataset.supervised_counts`.
        edge: the verifier's whole head and final norm, for validation over the full vocabulary.
        recorder: computes the token losses, `LossRecorder(token_loss(loss))`.
        normalisation: what they are averaged over, see `loss_weights`.
        compute_dtype: fp32 raises the stored states before noise is added; None leaves them as stored.
        pruned_loss: computes only where a loss counts, with this; None: speculators' forward with `recorder`.
            A batch may bring its plan along, see `plan_preparer`.
        compiled: whether what is compiled on CUDA runs compiled.
    """

    def __init__(
        self,
        draft: nn.Module,
        plan: RunPlan,
        *,
        supervised_counts: Callable[[int, int], Sequence[int]],
        ttt_steps: int,
        recorder: LossRecorder,
        pruned_loss: LossAndGradient | None = None,
        step_decay: float,
        normalisation: Normalisation = Normalisation.token,
        optim: OptimConfig,
        vocabulary: DraftVocabulary,
        edge: EdgeWeights,
        rms_norm_eps: float,
        noise: TransformTensors | None = None,
        seed: int = 0,
        compute_dtype: torch.dtype | None = torch.float32,
        compiled: bool = False,
    ) -> None:
        super().__init__()
        assert edge.head is not None
        assert edge.norm is not None
        self.automatic_optimization = False
        self.strict_loading = False  # checkpoints lack the frozen tensors; `checkpoint_state` checks the rest
        self.draft = draft
        self.plan = plan
        self.ttt_steps = ttt_steps
        self.step_decay = step_decay
        self.normalisation = normalisation
        self.optim = optim
        self.vocabulary = vocabulary
        self.noise = noise
        self.seed = seed
        self.compute_dtype = compute_dtype
        self.compiled = compiled
        self.recorder = recorder
        self.pruned_loss = pruned_loss
        self.rms_norm_eps = rms_norm_eps
        self.supervised_counts = supervised_counts
        self.learning_rate = build_learning_rate(optim, plan)
        self.num_updates = 0  # completed, over the whole run
        self.update_done = False  # whether the batch just trained completed an update
        self.stop_requested = False  # this process was told to end; all ranks learn of it with their sums
        self._micro_batch = 0
        self._current: tuple[PlannedUpdate, list[list[Weights]]] | None = None
        self._generator: torch.Generator | None = None
        self.average: WeightAverage | None = None  # where optim.ema_decay is set
        self._held_average: dict[str, Tensor] | None = None  # of the checkpoint a run goes on from
        self._run: Callable[[Callable[[], TTTOutput]], TTTOutput] = lambda compute: compute()
        self.num_planned_supervised = [0] * ttt_steps  # since the sums were last reset
        # buffers follow the module to its device; not persistent, so no checkpoint holds them
        self.register_buffer("verifier_head", edge.head, persistent=False)
        self.register_buffer("verifier_norm", edge.norm, persistent=False)
        self.register_buffer("t2d", vocabulary.t2d, persistent=False)
        self.train()

    # set-up

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self._run = self.trainer.strategy.shard(self.draft)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        optimizers = build_optimizers(self.draft.named_parameters(), self.optim)
        self._optimizer_settings = [settings_of(optimizer) for optimizer in optimizers]
        return optimizers

    def on_fit_start(self) -> None:
        self.train_sums = Sums(train_widths(self.ttt_steps), self.device)
        domains = self.trainer.datamodule.domain_names
        self.validation_sums = Sums(validation_widths(self.ttt_steps), self.device, max(1, len(domains)))
        self._generator = torch.Generator(self.device)
        trainable = [(name, p) for name, p in self.draft.named_parameters() if p.requires_grad]
        self._trainable = [p for _, p in trainable]
        if self.optim.ema_decay is not None:
            self.average = WeightAverage(trainable, self.optim.ema_decay, self._held_average)

    def on_train_start(self) -> None:
        for optimizer, settings in zip(self._optimizers(), self._optimizer_settings, strict=True):
            apply_settings(optimizer.optimizer, settings)

    def on_fit_end(self) -> None:
        if isinstance(self.trainer.strategy, ShardedStrategy):
            self.trainer.strategy.gather(self.draft)

    def train(self, mode: bool = True) -> Eagle3Module:
        """Training mode for what is trained; frozen parts stay in evaluation mode."""
        super().train(mode)
        for child in self.draft.modules():
            parameters = list(child.parameters())
            if parameters and not any(p.requires_grad for p in parameters):
                child.eval()
        return self

    def transfer_batch_to_device(
        self, batch: dict[str, Tensor], device: torch.device, dataloader_idx: int
    ) -> Any:
        host = {key: value for key, value in batch.items() if stays_on_host(key)}
        moved = {key: value for key, value in batch.items() if key not in host}
        return {**super().transfer_batch_to_device(moved, device, dataloader_idx), **host}

    # training

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """One micro-batch: its share of the update's loss, backward, and the step when it is the update's last."""
        update, weights = self._begin(batch)
        last = self._micro_batch == update.num_micro_batches - 1
        if self._micro_batch == 0:
            for optimizer in self._optimizers():
                optimizer.zero_grad()
        if self.normalisation is Normalisation.sequence:
            document_ids = batch["document_ids"][0].clamp(min=0)  # padding is in no loss, whatever it weighs
            output = self._forward(batch, update, weights.t()[:, document_ids])
            loss = output.loss_sums.sum()
        else:  # all rows of a pack weigh the same
            output = self._forward(batch, update)
            loss = (output.loss_sums * weights[0]).sum()
        self._backward(loss, synchronise=last)
        norm = self._step() if last else torch.zeros((), device=loss.device)
        self._count(batch, output, loss, norm, last)
        self._micro_batch = 0 if last else self._micro_batch + 1
        self.update_done = last

    def _begin(self, batch: dict[str, Tensor]) -> tuple[PlannedUpdate, Tensor]:
        """The update this batch belongs to, checked against the plan, and the weights of its rows, `[n, K]`."""
        if self._micro_batch == 0 or self._current is None:
            update = self.plan.update(self.num_updates)
            counts = [[self.supervised_counts(row, self.ttt_steps) for row in pack] for pack in update.packs]
            self._current = update, loss_weights(counts, self.step_decay, self.normalisation)
            totals = [sum(column) for column in zip(*(row for pack in counts for row in pack), strict=True)]
            self.num_planned_supervised = [
                a + b for a, b in zip(self.num_planned_supervised, totals, strict=True)
            ]
        update, weights = self._current
        planned = update.row_index(self._micro_batch, self.global_rank)
        rows = tuple(batch["row_index"].tolist())
        if rows != planned:
            raise RuntimeError(f"update {update.index}: the loader gave rows {rows}, the plan says {planned}")
        place = update.place(self._micro_batch, self.global_rank)
        # a row that only keeps this rank busy has no supervised token: any weight will do
        own = weights[place] if place < len(weights) else [(0.0,) * self.ttt_steps]
        return update, torch.tensor(own, dtype=torch.float32).to(self.device, non_blocking=True)

    def _forward(
        self, batch: dict[str, Tensor], update: PlannedUpdate | None, token_weights: Tensor | None = None
    ) -> TTTOutput:
        batch = dict(batch)
        if self.compute_dtype is not None:
            for name in ("hidden_states", "verifier_last_hidden_states"):
                batch[name] = batch[name].to(self.compute_dtype)
        if self.noise is not None and update is not None:
            assert self._generator is not None
            self._generator.manual_seed(pack_seed(self.seed, update.epoch, batch["row_index"].tolist()))
            batch = self.noise(batch, generator=self._generator)
        return self._run(partial(self._unroll, batch, token_weights))

    def _unroll(self, batch: dict[str, Any], token_weights: Tensor | None) -> TTTOutput:
        if self.pruned_loss is None:
            return ttt_forward(
                self.draft,
                batch,
                self.ttt_steps,
                self.recorder,
                token_weights=token_weights,
                compiled=self.compiled,
            )
        return pruned_forward(
            self.draft,
            batch,
            self.ttt_steps,
            self.pruned_loss,
            token_weights=token_weights,
            plan=batch.get(PLAN),
            compiled=self.compiled,
        )

    def _backward(self, loss: Tensor, *, synchronise: bool) -> None:
        """Add gradients; ranks exchange them once, in the update's last micro-batch."""
        strategy = self.trainer.strategy
        local = isinstance(strategy, ParallelStrategy) and not synchronise
        with (
            strategy.block_backward_sync() if local else nullcontext(),
            torch.autocast(loss.device.type, enabled=False),
        ):
            # DDP averages over ranks, and the update's loss is a sum over them
            self.manual_backward(loss * self.trainer.world_size)

    def _optimizers(self) -> list[Any]:
        held: Any = self.optimizers()
        return held if isinstance(held, list) else [held]

    def _step(self) -> Tensor:
        """Clip, set the rate of this update, step. Returns the gradient norm before clipping."""
        limit = self.optim.grad_clip_norm
        norm = nn.utils.clip_grad_norm_(self._trainable, float("inf") if limit is None else limit)
        for optimizer in self._optimizers():
            set_learning_rate(optimizer.optimizer, self.learning_rate(self.num_updates), self.optim)
            optimizer.step()
        self.num_updates += 1
        if self.average is not None:
            self.average.update(self.num_updates)
        return whole(norm)

    def _count(
        self, batch: dict[str, Tensor], output: TTTOutput, loss: Tensor, norm: Tensor, last: bool
    ) -> None:
        own = float(last and self.global_rank == 0)  # what is equal on all ranks is counted by one
        stop = float(self.stop_requested)
        self.train_sums.add(train_sums(output, batch, self.t2d, loss, norm * own, updates=own, stop=stop))

    # validation

    def on_validation_epoch_start(self) -> None:
        self.validation_sums.reset()
        if self.average is not None:
            self.average.exchange()

    def on_validation_epoch_end(self) -> None:
        if self.average is not None:  # before the callbacks that save
            self.average.exchange()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Sums of one pack, without noise. Rows that only keep a rank busy have no loss mask: they count 0."""
        output = self._forward(batch, None)
        edge = EdgeWeights(None, self.verifier_head, self.verifier_norm)
        sums = pack_sums(output, batch, self.vocabulary, self.t2d, edge, self.rms_norm_eps)
        self.validation_sums.add(sums, group=batch[DOMAIN])

    # checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint_state.trim(checkpoint, self.draft, self.plan, self.num_updates, self.seed)
        average = self.average.state_dict() if self.average is not None else None
        checkpoint_state.add_optimizer(checkpoint, self.optim, average)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_updates = checkpoint_state.check(checkpoint, self.draft, self.plan, self.seed)
        self._held_average = checkpoint_state.check_optimizer(checkpoint, self.optim)
        self._micro_batch = 0
