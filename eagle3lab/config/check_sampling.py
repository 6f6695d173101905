"""Whether the verifier can answer by itself with the sampling that is asked for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

from .errors import Problem
from .schema import DataConfig, SamplingConfig

_RANGES = {
    "temperature": (0.0, math.inf, "a finite number from 0"),
    "top_p": (math.ulp(0.0), 1.0, "a number in (0, 1]"),
    "top_k": (0, math.inf, "a number from 0 (0: off)"),
    "max_new_tokens": (1, math.inf, "at least 1"),
    "seed": (0, math.inf, "a number from 0"),
}


def check_sampling(data: DataConfig) -> Iterator[Problem]:
    """Values out of range, and values that nothing would use."""
    values, defaults = asdict(data.sampling), asdict(SamplingConfig())
    for name, (low, high, expected) in _RANGES.items():
        if not (math.isfinite(values[name]) and low <= values[name] <= high):
            key = f"data.sampling.{name}"
            yield Problem(key, values[name], expected, f"{key}={defaults[name]:g}")
    changed = {name: value for name, value in values.items() if value != defaults[name]}
    if changed and not data.regenerate:
        yield Problem(
            "data.sampling is set but data.regenerate is false",
            changed,
            "sampling only where the verifier answers itself",
            "data.regenerate=true",
        )
