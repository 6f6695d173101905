"""Puts a run's data and its `Eagle3Module` together: what depends on device and precision is decided here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from eagle3lab.config.noise import NoiseConfig
from eagle3lab.config.schema import (
    Accelerator,
    Attention,
    DraftConfig,
    HardwareConfig,
    LossConfig,
    OptimConfig,
    Precision,
    TrainerConfig,
    TrainingStep,
)
from eagle3lab.data.noise import build_noise
from eagle3lab.data.shift import Batch
from eagle3lab.draft.frozen import shrink_frozen
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient
from eagle3lab.draft.pruned.plan import plan_preparer
from eagle3lab.draft.pruned.step import check_prunable
from eagle3lab.draft.speculators_model import speculators_loss
from eagle3lab.draft.ttt import LossRecorder
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.weights import EdgeWeights

from .datamodule import Eagle3DataModule
from .module import Eagle3Module
from .run_plan import RunPlan
from .work import work_counter


def pack_preparer(draft: DraftConfig, hardware: HardwareConfig) -> Callable[[Batch], dict[str, Any]] | None:
    """What the loader's threads compute for the module of `build_module`: the plan of the pruned step."""
    if draft.step is not TrainingStep.pruned:
        return None
    on_cuda = hardware.accelerator is Accelerator.cuda
    return plan_preparer(draft, cuda=on_cuda, flex=on_cuda and hardware.attention is Attention.flex)


def build_data(
    store: StoreReader,
    aux_layer_ids: Sequence[int],
    hardware: HardwareConfig,
    train: TrainerConfig,
    draft: DraftConfig,
    loss: LossConfig,
    noise: NoiseConfig,
) -> Eagle3DataModule:
    """The store's rows in packs, with what the module of `build_module` needs of each beside it."""
    return Eagle3DataModule(
        store,
        seq_len=train.seq_len,
        seed=train.seed,
        aux_layer_ids=aux_layer_ids,
        num_threads=hardware.num_loader_threads,
        supervision=loss.supervision,
        data_share=train.data_share,
        noise=noise,
        prepare=pack_preparer(draft, hardware),
        count_work=work_counter(draft),
    )


def build_module(
    draft: nn.Module,
    plan: RunPlan,
    data: Eagle3DataModule,
    *,
    hardware: HardwareConfig,
    ttt_steps: int,
    loss: LossConfig,
    optim: OptimConfig,
    noise: NoiseConfig,
    seed: int,
    vocabulary: DraftVocabulary,
    edge: EdgeWeights,
    rms_norm_eps: float,
    step: TrainingStep = TrainingStep.pruned,
) -> Eagle3Module:
    """The module for resolved `hardware`. `edge` holds the verifier's whole head and norm, for validation.

    On CUDA token losses of the reference step are speculators' fused kernels. With bf16 the stored states stay as
    they are, the verifier's head is kept in bf16, and parameters stay fp32; the pruned step keeps frozen ones in
    bf16 where that is exact.
    """
    assert edge.head is not None
    assert data.noise == noise, "the data module was made for another noise"
    assert data.supervision is loss.supervision, "the data module was made for another loss.supervision"
    low = hardware.precision is Precision.bf16
    on_cuda = hardware.accelerator is Accelerator.cuda
    head = edge.head.to(torch.bfloat16) if low else edge.head
    pruned = step is TrainingStep.pruned
    if pruned:
        check_prunable(draft)
        if low:
            shrink_frozen(draft, torch.bfloat16)
    return Eagle3Module(
        draft,
        plan,
        supervised_counts=data.supervised_counts(),
        ttt_steps=ttt_steps,
        recorder=LossRecorder(speculators_loss(loss, "fused") if on_cuda else token_loss(loss)),
        pruned_loss=loss_and_gradient(loss, compiled=hardware.compile) if pruned else None,
        step_decay=loss.step_decay,
        normalisation=loss.normalisation,
        optim=optim,
        vocabulary=vocabulary,
        edge=EdgeWeights(None, head, edge.norm),
        rms_norm_eps=rms_norm_eps,
        noise=build_noise(noise, data.layer_rms.typical if data.layer_rms else None),
        seed=seed,
        compute_dtype=None if low else torch.float32,
        compiled=hardware.compile,
    )
