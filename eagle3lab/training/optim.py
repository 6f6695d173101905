"""Optimizers over the trainable parameters, and a learning rate that is a function of the update alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import OptimConfig, OptimKind, Schedule

from .run_plan import RunPlan


@dataclass(frozen=True)
class LearningRate:
    """The rate at an update. Holds no state: a resumed or lengthened run reads the same table.

    Updates are counted from 0. Warm-up is linear from 0, so the first update of a warmed-up run has rate 0
    and update `warmup_updates` the peak; from there to `total_updates` the rate falls to `min_share * peak`.
    """

    peak: float
    total_updates: int
    warmup_updates: int = 0
    schedule: Schedule = Schedule.constant
    min_share: float = 0.0

    def __call__(self, update: int) -> float:
        if update < self.warmup_updates:
            return self.peak * update / self.warmup_updates
        if self.schedule is Schedule.constant:
            return self.peak
        progress = min(1.0, (update - self.warmup_updates) / max(1, self.total_updates - self.warmup_updates))
        left = (
            1.0 - progress if self.schedule is Schedule.linear else 0.5 * (1.0 + math.cos(math.pi * progress))
        )
        return self.peak * (self.min_share + (1.0 - self.min_share) * left)


def warmup_updates(optim: OptimConfig, plan: RunPlan) -> int:
    """The warm-up of a run in updates, however it was given."""
    if optim.lr_warmup_tokens:
        return plan.updates_for_tokens(optim.lr_warmup_tokens)
    if optim.lr_warmup_share:
        return round(optim.lr_warmup_share * plan.num_updates)
    return optim.lr_warmup_updates or 0


def build_learning_rate(optim: OptimConfig, plan: RunPlan) -> LearningRate:
    """The schedule over the run's known number of updates; a warm-up in tokens or as a share is turned into updates here.

    Raises `UserError` when warm-up leaves no update with a rate above 0.
    """
    warmup = warmup_updates(optim, plan)
    if warmup > 0 and plan.num_updates == 1:
        raise UserError(
            Problem(
                "the only update of this run has learning rate 0, the first of its warm-up",
                f"{warmup} warm-up updates",
                "a longer run, or no warm-up",
                "optim.lr_warmup_updates=0 optim.lr_warmup_tokens=null optim.lr_warmup_share=null",
            )
        )
    return LearningRate(optim.lr, plan.num_updates, warmup, optim.schedule, optim.lr_min_share)


# a matrix of these holds one vector per token: its rows have nothing to be orthogonal to
_ONE_ROW_PER_TOKEN = ("embed_tokens", "lm_head")


def muon_takes(name: str, parameter: nn.Parameter) -> bool:
    """Whether Muon trains a parameter: the draft's matrices, its input projection included (as speculators has it)."""
    is_matrix = parameter.ndim == 2 and min(parameter.shape) > 1
    return is_matrix and not any(part in name for part in _ONE_ROW_PER_TOKEN)


def build_optimizers(
    parameters: Iterable[tuple[str, nn.Parameter]], optim: OptimConfig
) -> list[torch.optim.Optimizer]:
    """AdamW (fused), or torch's Muon and AdamW for what Muon does not take, over what requires a gradient.

    Weight decay spares norms and biases. Muon's steps are scaled to AdamW's size ("match_rms_adamw", arXiv
    2502.16982), so that rates and decay tuned for one serve the other; it keeps one state per weight, AdamW two.
    Raises `ValueError` when a parameter is not fp32: updates below half a bf16 spacing would be lost.
    """
    trainable = [(name, p) for name, p in parameters if p.requires_grad]
    low = [name for name, p in trainable if p.dtype != torch.float32]
    if low:
        raise ValueError(f"trainable parameters must be fp32 masters, these are not: {low}")
    optimizers: list[torch.optim.Optimizer] = []
    if optim.kind is OptimKind.muon:
        taken = [p for name, p in trainable if muon_takes(name, p)]
        trainable = [(name, p) for name, p in trainable if not muon_takes(name, p)]
        if taken:
            optimizers.append(_muon(taken, optim))
    if trainable:
        optimizers.append(_adamw([p for _, p in trainable], optim))
    return optimizers


def _muon(parameters: list[nn.Parameter], optim: OptimConfig) -> torch.optim.Muon:
    return torch.optim.Muon(
        parameters,
        lr=optim.muon_lr or optim.lr,
        momentum=optim.muon_momentum,
        weight_decay=optim.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )


def _adamw(parameters: list[nn.Parameter], optim: OptimConfig) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    beta1, beta2 = optim.betas
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=optim.lr,
        betas=(beta1, beta2),
        eps=optim.eps,
        fused=True,
    )


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What an optimizer was built with, group by group: all but the parameters."""
    return [
        {key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups
    ]


def apply_settings(optimizer: torch.optim.Optimizer, settings: list[dict[str, Any]]) -> None:
    """Put `settings_of` back: with the states of a checkpoint, torch also takes the settings it was made with."""
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float, optim: OptimConfig) -> None:
    """Give every group `rate`, the schedule of `optim.lr`; Muon's follow the same curve to their own peak."""
    if isinstance(optimizer, torch.optim.Muon) and optim.muon_lr is not None:
        rate = rate * (optim.muon_lr / optim.lr)
    for group in optimizer.param_groups:
        group["lr"] = rate
