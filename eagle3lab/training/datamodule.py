"""`Eagle3DataModule`: packs of a hidden-state store, for training in plan order and for validation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.flops import StepWork
from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.config.schema import Supervision, TrainerConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.domains import Domains
from eagle3lab.data.layer_rms import LayerRms, measure_layer_rms, noise_ratios
from eagle3lab.data.packing import PackBatchSampler
from eagle3lab.data.shift import Batch
from eagle3lab.store.reader import StoreReader

from .loader import DOMAIN, Batches, PackLoader, PlannedBatches
from .run_plan import RunPlan


class Eagle3DataModule(LightningDataModule):
    """Training and validation rows of a store.

    Args:
        source: an opened store.
        seq_len: length of a pack.
        aux_layer_ids: the draft's aux layers, a subset of the store's; None takes all.
        supervision: which predictions are trained on. Validation always measures those of `input_token`, so
            that its figures can be compared between rules.
        data_share: of the training conversations, see `data.share`; validation has all rows.
        noise: that a module with these data adds, to say how large it is beside the states.
        prepare, count_work: see `PackLoader`.

    `domains`: where the validation rows come from, see `Domains`.
    """

    def __init__(
        self,
        source: StoreReader,
        *,
        seq_len: int,
        seed: int = 0,
        aux_layer_ids: Sequence[int] | None = None,
        num_threads: int = 0,
        supervision: Supervision = Supervision.input_token,
        data_share: float = 1.0,
        noise: NoiseConfig | None = None,
        prepare: Callable[[Batch], dict[str, Any]] | None = None,
        count_work: Callable[[Batch], StepWork] | None = None,
    ) -> None:
        super().__init__()
        self.seq_len = seq_len
        self.seed = seed
        self.num_threads = num_threads
        self.train_data = Eagle3SampleFileDataset(
            source,
            split="train",
            aux_layer_ids=aux_layer_ids,
            raw=True,
            supervision=supervision,
            data_share=data_share,
        )
        self.validation_data = Eagle3SampleFileDataset(
            source, split="validation", aux_layer_ids=aux_layer_ids, raw=True
        )
        self.domains = Domains.of([source.rows[i].source for i in source.indices("validation")])
        self.supervision = supervision
        self.data_share = data_share
        self.noise = noise or NoiseConfig()
        self.layer_rms: LayerRms | None = None  # of the draft's aux layers, where there is noise
        if self.noise.kind is not NoiseKind.none:
            ids = aux_layer_ids or source.manifest.layer_ids
            self.layer_rms = measure_layer_rms(source, ids, data_share=data_share)
        self._source = source
        self.prepare = prepare
        self.count_work = count_work
        self._plan: RunPlan | None = None
        self.train_loader: PackLoader | None = None
        self.validation_loader: PackLoader | None = None

    def plan(self, train: TrainerConfig, *, num_replicas: int, micro_batches: int) -> RunPlan:
        """The updates of a run on `num_replicas` devices with `micro_batches` packs on each per update.

        Raises `UserError` when the store has no training rows or a row does not fit a pack.
        """
        if len(self.train_data) == 0:
            again = "extract.py again into another store=DIRECTORY, with data.validation_share=0.05"
            fix = again if self.data_share == 1 else "train.data_share=1"
            raise UserError(Problem("the store has no training rows", fix=fix))
        sampler = PackBatchSampler(self.train_data.lengths, self.seq_len, seed=self.seed)
        self._plan = RunPlan(
            sampler.plan,
            self.train_data.lengths,
            num_replicas=num_replicas,
            micro_batches=micro_batches,
            max_epochs=train.max_epochs,
            max_updates=train.max_updates,
            max_tokens=train.max_tokens,
        )
        return self._plan

    def supervised_counts(self) -> Callable[[int, int], tuple[int, ...]]:
        """Per-step supervised tokens of a training row, remembered: every epoch asks for all of them."""
        return lru_cache(maxsize=1_000_000)(self.train_data.supervised_counts)

    def token_counts(self) -> Tensor:
        """How often each id is a supervised token of the training rows, `[vocab_size]` int64."""
        if self.data_share == 1:
            return self._source.token_counts()
        counts = torch.zeros(self._source.manifest.verifier.vocab_size, dtype=torch.int64)
        for row in self.train_data.store_rows():
            ids, mask = self._source.read_tokens(row)
            counts += torch.bincount(ids[mask.bool()], minlength=len(counts))
        return counts

    @property
    def noise_ratios(self) -> dict[int, float]:
        """RMS of the noise as a share of each aux layer's, by its id; empty without noise."""
        if self.layer_rms is None:
            return {}
        return dict(zip(self.layer_rms.layer_ids, noise_ratios(self.noise, self.layer_rms), strict=True))

    @property
    def noise_figures(self) -> dict[str, float]:
        """`noise_ratios` as `noise/ratio_layer{id}`, for the logs."""
        return {f"noise/ratio_layer{layer}": ratio for layer, ratio in self.noise_ratios.items()}

    @property
    def num_validation_rows(self) -> int:
        return len(self.validation_data)

    def train_dataloader(self) -> PackLoader:
        """This rank's packs from the first update that is still to be made."""
        assert self._plan is not None
        assert self.trainer is not None
        start = self.trainer.lightning_module.num_updates
        batches = PlannedBatches(self._plan, self.trainer.global_rank, int(start))
        self.train_loader = self._loader(self.train_data, batches, self.prepare)
        return self.train_loader

    def val_dataloader(self) -> PackLoader | list[Any]:
        """Every validation row once, in fixed packs of one domain each, over all ranks."""
        if self.num_validation_rows == 0:
            return []
        assert self.trainer is not None
        # a rank with nothing left gets rows without weight, so that all ranks take part equally often
        batches = PackBatchSampler(
            self.validation_data.lengths,
            self.seq_len,
            num_replicas=self.trainer.world_size,
            rank=self.trainer.global_rank,
            shuffle=False,
            drop_last=False,
            groups=self.domains.of_row if self.domain_names else None,
        )
        self.validation_loader = self._loader(self.validation_data, batches, self._with_domain)
        return self.validation_loader

    @property
    def domain_names(self) -> tuple[str, ...]:
        """Of the domains that validation tells apart; empty where it does not."""
        return self.domains.names if self.domains.told_apart else ()

    def _with_domain(self, batch: Batch) -> dict[str, Any]:
        row = int(batch["row_index"][0])  # -1: a row without weight, which counts nothing wherever it is put
        domain = self.domains.of_row[row] if self.domain_names and row >= 0 else 0
        return {**(self.prepare(batch) if self.prepare else {}), DOMAIN: domain}

    def _loader(
        self,
        data: Eagle3SampleFileDataset,
        batches: Batches,
        prepare: Callable[[Batch], dict[str, Any]] | None,
    ) -> PackLoader:
        assert self.trainer is not None
        device = self.trainer.strategy.root_device
        collate = create_collate_fn(self.seq_len, pin_memory=device.type == "cuda")
        return PackLoader(
            data,
            batches,
            collate,
            num_threads=self.num_threads,
            device=device,
            prepare=prepare,
            count_work=self.count_work,
        )
