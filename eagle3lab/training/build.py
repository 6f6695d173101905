"""Puts an `Eagle3Module` together from a run's parts: what depends on device and precision is decided here."""

from __future__ import annotations

import torch
from torch import nn

from eagle3lab.config.schema import (
    Accelerator,
    HardwareConfig,
    LossConfig,
    NoiseConfig,
    OptimConfig,
    Precision,
)
from eagle3lab.data.noise import build_noise
from eagle3lab.draft.speculators_model import loss_function
from eagle3lab.draft.ttt import LossRecorder
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.weights import EdgeWeights

from .datamodule import Eagle3DataModule
from .module import Eagle3Module
from .run_plan import RunPlan


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
) -> Eagle3Module:
    """The module for resolved `hardware`. `edge` holds the verifier's whole head and norm, for validation.

    On CUDA token losses are fused kernels. With bf16 the stored states stay as they are, the verifier's head
    is kept in bf16, and parameters stay fp32.
    """
    assert edge.head is not None
    low = hardware.precision is Precision.bf16
    on_cuda = hardware.accelerator is Accelerator.cuda
    head = edge.head.to(torch.bfloat16) if low else edge.head
    return Eagle3Module(
        draft,
        plan,
        supervised_counts=data.supervised_counts(),
        ttt_steps=ttt_steps,
        recorder=LossRecorder(loss_function(loss.kind, "fused" if on_cuda else "eager")),
        step_decay=loss.step_decay,
        optim=optim,
        vocabulary=vocabulary,
        edge=EdgeWeights(None, head, edge.norm),
        rms_norm_eps=rms_norm_eps,
        noise=build_noise(noise),
        seed=seed,
        compute_dtype=None if low else torch.float32,
        compiled=hardware.compile,
    )
