"""`Eagle3Module`: the draft, its training step over whole updates, and its validation step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor, nn

from eagle3lab.config.schema import OptimConfig
from eagle3lab.data.noise import TransformTensors
from eagle3lab.draft.ttt import LossRecorder, TTTOutput, correct_over_full_vocabulary, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.weights import EdgeWeights

from . import checkpoint_state
from .loader import HOST_KEYS
from .metrics import Sums, train_widths, validation_widths
from .noise_seed import pack_seed
from .optim import build_learning_rate, build_optimizer, set_learning_rate
from .run_plan import PlannedUpdate, RunPlan
from .validation import verifier_argmax


class Eagle3Module(LightningModule):
    """An EAGLE-3 draft in training.

    Optimisation is manual because an update is the plan's, not a fixed number of batches: the last update of
    an epoch may hold fewer packs, and its loss must still be the sum over its tokens divided by their number.

    Args:
        draft: `Eagle3DraftModel` with fp32 parameters, frozen ones not requiring a gradient.
        plan: every update of the run.
        supervised_counts: per-step supervised tokens of a row, `dataset.supervised_counts`.
        edge: the verifier's whole head and final norm, for validation over the full vocabulary.
        recorder: computes the token losses, `LossRecorder(loss_function(kind, implementation))`.
        compute_dtype: fp32 raises the stored states before noise is added; None leaves them as stored.
        compiled: whether a forward that speculators compiles on CUDA runs compiled.
    """

    def __init__(
        self,
        draft: nn.Module,
        plan: RunPlan,
        *,
        supervised_counts: Callable[[int, int], Sequence[int]],
        ttt_steps: int,
        recorder: LossRecorder,
        step_decay: float,
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
        self.optim = optim
        self.vocabulary = vocabulary
        self.noise = noise
        self.seed = seed
        self.compute_dtype = compute_dtype
        self.compiled = compiled
        self.recorder = recorder
        self.rms_norm_eps = rms_norm_eps
        self.supervised_counts = supervised_counts
        self.learning_rate = build_learning_rate(optim, plan)
        self.num_updates = 0  # completed, over the whole run
        self.update_done = False  # whether the batch just trained completed an update
        self._micro_batch = 0
        self._current: tuple[PlannedUpdate, Tensor] | None = None
        self._generator: torch.Generator | None = None
        self.num_planned_supervised = [0] * ttt_steps  # since the sums were last reset
        # buffers follow the module to its device; not persistent, so no checkpoint holds them
        self.register_buffer("verifier_head", edge.head, persistent=False)
        self.register_buffer("verifier_norm", edge.norm, persistent=False)
        self.register_buffer("t2d", vocabulary.t2d, persistent=False)
        self.train()

    # set-up

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return build_optimizer(self.draft.named_parameters(), self.optim)

    def on_fit_start(self) -> None:
        self.train_sums = Sums(train_widths(self.ttt_steps), self.device)
        self.validation_sums = Sums(validation_widths(self.ttt_steps), self.device)
        self._generator = torch.Generator(self.device)
        self._trainable = [p for p in self.draft.parameters() if p.requires_grad]

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
        host = {key: batch[key] for key in HOST_KEYS if key in batch}
        moved = {key: value for key, value in batch.items() if key not in host}
        return {**super().transfer_batch_to_device(moved, device, dataloader_idx), **host}

    # training

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """One micro-batch: its share of the update's loss, backward, and the step when it is the update's last."""
        update, weights = self._begin(batch)
        last = self._micro_batch == update.num_micro_batches - 1
        optimizer: Any = self.optimizers()
        if self._micro_batch == 0:
            optimizer.zero_grad()
        output = self._forward(batch, update)
        loss = (output.loss_sums * weights).sum()
        self._backward(loss, synchronise=last)
        norm = self._step(optimizer) if last else torch.zeros((), device=loss.device)
        self._count(batch, output, loss, norm, last)
        self._micro_batch = 0 if last else self._micro_batch + 1
        self.update_done = last

    def _begin(self, batch: dict[str, Tensor]) -> tuple[PlannedUpdate, Tensor]:
        """The update this batch belongs to, checked against the plan, and each step's weight in the loss."""
        if self._micro_batch == 0 or self._current is None:
            update = self.plan.update(self.num_updates)
            counts = [self.supervised_counts(row, self.ttt_steps) for row in update.rows]
            totals = tuple(sum(column) for column in zip(*counts, strict=True))
            decay = self.step_decay
            # an update without supervised tokens has loss 0, not 0/0
            weights = [decay**k / total if total else 0.0 for k, total in enumerate(totals)]
            on_device = torch.tensor(weights, dtype=torch.float32).to(self.device, non_blocking=True)
            self._current = update, on_device
            self.num_planned_supervised = [
                a + b for a, b in zip(self.num_planned_supervised, totals, strict=True)
            ]
        update, on_device = self._current
        planned = update.row_index(self._micro_batch, self.global_rank)
        rows = tuple(batch["row_index"].tolist())
        if rows != planned:
            raise RuntimeError(f"update {update.index}: the loader gave rows {rows}, the plan says {planned}")
        return update, on_device

    def _forward(self, batch: dict[str, Tensor], update: PlannedUpdate | None) -> TTTOutput:
        batch = dict(batch)
        if self.compute_dtype is not None:
            for name in ("hidden_states", "verifier_last_hidden_states"):
                batch[name] = batch[name].to(self.compute_dtype)
        if self.noise is not None and update is not None:
            assert self._generator is not None
            self._generator.manual_seed(pack_seed(self.seed, update.epoch, batch["row_index"].tolist()))
            batch = self.noise(batch, generator=self._generator)
        return ttt_forward(self.draft, batch, self.ttt_steps, self.recorder, compiled=self.compiled)

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

    def _step(self, optimizer: Any) -> Tensor:
        """Clip, set the rate of this update, step. Returns the gradient norm before clipping."""
        limit = self.optim.grad_clip_norm
        norm = nn.utils.clip_grad_norm_(self._trainable, float("inf") if limit is None else limit)
        set_learning_rate(optimizer.optimizer, self.learning_rate(self.num_updates))
        optimizer.step()
        self.num_updates += 1
        return norm

    def _count(
        self, batch: dict[str, Tensor], output: TTTOutput, loss: Tensor, norm: Tensor, last: bool
    ) -> None:
        own = float(last and self.global_rank == 0)  # what is equal on all ranks is counted by one
        with torch.no_grad():
            supervised = batch["loss_mask"][0].bool()
            covered = (self.t2d[batch["input_ids"][0]] & supervised).sum()
            zero = norm.new_zeros(())
            self.train_sums.add(
                {
                    "updates": zero + own,
                    "loss": loss,
                    "loss_step": output.loss_sums,
                    "supervised_step": output.num_supervised,
                    "correct_step": (output.correct & output.supervised).sum(dim=1),
                    "covered": covered,
                    "grad_norm": norm * own,
                }
            )

    # validation

    def on_validation_epoch_start(self) -> None:
        self.validation_sums.reset()

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Sums of one pack, without noise. Rows that only keep a rank busy have no loss mask: they count 0."""
        output = self._forward(batch, None)
        document_ids = batch["document_ids"][0]
        supervised = batch["loss_mask"][0].bool() & (document_ids >= 0)
        edge = EdgeWeights(None, self.verifier_head, self.verifier_norm)
        with torch.autocast(self.device.type, enabled=False):
            target = verifier_argmax(
                batch["verifier_last_hidden_states"][0], supervised, edge, self.rms_norm_eps
            )
        counts = correct_over_full_vocabulary(
            output.draft_tokens, self.vocabulary, target, document_ids, batch["loss_mask"][0]
        )
        self.validation_sums.add(
            {"loss_step": output.loss_sums, **counts._asdict(), "covered": self.t2d[target[supervised]].sum()}
        )

    # checkpoints

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint_state.trim(checkpoint, self.draft, self.plan, self.num_updates, self.seed)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.num_updates = checkpoint_state.check(checkpoint, self.draft, self.plan, self.seed)
        self._micro_batch = 0
