"""Checks of the optimizer's settings."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .bounds import below_one, positive, within
from .errors import Problem
from .schema import OptimConfig, OptimKind


def check_optim(optim: OptimConfig) -> Iterator[Problem]:
    """Problems of `optim`."""
    yield from within("optim.lr", optim.lr, 0, 1, open_low=True, proposal=OptimConfig.lr)
    yield from within("optim.lr_min_share", optim.lr_min_share, 0, 1)
    yield from within("optim.weight_decay", optim.weight_decay, 0, 1)
    yield from within("optim.eps", optim.eps, 0, 1, proposal=OptimConfig.eps)
    yield from within("optim.muon_lr", optim.muon_lr, 0, 1, open_low=True, proposal=1e-3)
    yield from below_one("optim.muon_momentum", optim.muon_momentum, 0.95)
    yield from below_one("optim.ema_decay", optim.ema_decay, 0.999)
    if optim.muon_lr is not None and optim.kind is not OptimKind.muon:
        yield Problem(
            f"optim.muon_lr is set but optim.kind is {optim.kind.value}",
            optim.muon_lr,
            "null",
            "optim.muon_lr=null",
        )
    clip = optim.grad_clip_norm
    if clip is not None and not (math.isfinite(clip) and clip > 0):
        yield Problem(
            "optim.grad_clip_norm", clip, "a finite number above 0, or null", "optim.grad_clip_norm=null"
        )
    if len(optim.betas) != 2 or not all(0 <= b < 1 for b in optim.betas):
        yield Problem("optim.betas", optim.betas, "two numbers in [0, 1)", "optim.betas=[0.9,0.95]")
    yield from positive("optim.lr_warmup_updates", optim.lr_warmup_updates, least=0)
    yield from positive("optim.lr_warmup_tokens", optim.lr_warmup_tokens, least=0)
    yield from within("optim.lr_warmup_share", optim.lr_warmup_share, 0, 0.5)
    given = {
        key: value
        for key in ("lr_warmup_updates", "lr_warmup_tokens", "lr_warmup_share")
        if (value := getattr(optim, key))
    }
    if len(given) > 1:
        keys = [f"optim.{key}" for key in given]
        yield Problem(
            f"{' and '.join(keys)} are {'both' if len(keys) == 2 else 'all'} set",
            " and ".join(f"{value:g}" for value in given.values()),
            "one of them",
            " ".join(f"{key}=null" for key in keys[:-1]),
        )
