"""Bounds of a single number, as problems that name the key and a value that would do."""

from __future__ import annotations

import math
from collections.abc import Iterator

from .errors import Problem


def positive(key: str, value: float | None, *, least: float = 1) -> Iterator[Problem]:
    """Finite and at least `least`; None is no problem, here and below."""
    if value is not None and not (value >= least and math.isfinite(value)):
        yield Problem(key, value, f"at least {least:g}", f"{key}={least:g}")


def within(
    key: str,
    value: float | None,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    proposal: float | None = None,
) -> Iterator[Problem]:
    """Of [low, high], or (low, high] with `open_low`. Proposes a bound where no `proposal` is given."""
    if value is None:
        return
    if not (math.isfinite(value) and (low < value if open_low else low <= value) and value <= high):
        bracket = "(" if open_low else "["
        bound = high if open_low else low
        yield Problem(
            key,
            value,
            f"a number in {bracket}{low:g}, {high:g}]",
            f"{key}={bound if proposal is None else proposal:g}",
        )


def below_one(key: str, value: float | None, proposal: float) -> Iterator[Problem]:
    """Of [0, 1)."""
    if value is not None and not 0 <= value < 1:
        yield Problem(key, value, "a number in [0, 1)", f"{key}={proposal}")
