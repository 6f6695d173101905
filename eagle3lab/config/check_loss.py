"""Checks of the loss's settings."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator

from .bounds import within
from .errors import Problem
from .schema import LossConfig, LossKind

_SINGLE = [kind.value for kind in LossKind if kind is not LossKind.sum]


def check_loss(loss: LossConfig) -> Iterator[Problem]:
    """Problems of `loss`."""
    yield from within("loss.step_decay", loss.step_decay, 0, 1, open_low=True)
    if loss.kind is LossKind.sum:
        yield from _weights(loss.weights)
    elif loss.weights:
        yield Problem(
            f"loss.weights is set but loss.kind is {loss.kind.value}",
            loss.weights,
            "weights only with loss.kind=sum",
            "loss=sum "
            + " ".join(f"loss.weights.{name}={weight:g}" for name, weight in loss.weights.items()),
        )
    if not (math.isfinite(loss.lk_eta) and loss.lk_eta >= 0):
        yield Problem(
            "loss.lk_eta", loss.lk_eta, "a finite number from 0", f"loss.lk_eta={LossConfig.lk_eta:g}"
        )
    elif loss.lk_eta != LossConfig.lk_eta and LossKind.lk.value not in (loss.kind.value, *loss.weights):
        yield Problem(
            f"loss.lk_eta is set but there is no lk in loss.kind={loss.kind.value}",
            loss.lk_eta,
            f"{LossConfig.lk_eta:g}",
            f"loss=lk loss.lk_eta={loss.lk_eta:g}",
        )


def _weights(weights: dict[str, float]) -> Iterator[Problem]:
    if not weights:
        yield Problem(
            "loss.kind is sum but loss.weights is empty",
            expected=f"weights of some of {', '.join(_SINGLE)}",
            fix="loss.weights.kl=1.0 loss.weights.tv=0.1",
        )
    for name, weight in weights.items():
        if name not in _SINGLE:
            near = difflib.get_close_matches(name, _SINGLE, n=1, cutoff=0)
            yield Problem(
                f"loss.weights has no loss {name}",
                expected=f"one of {', '.join(_SINGLE)}",
                fix=f"loss.weights.{near[0]}={weight:g}",
            )
        elif not (math.isfinite(weight) and weight > 0):
            yield Problem(
                f"loss.weights.{name}", weight, "a finite number above 0", f"loss.weights.{name}=1.0"
            )
