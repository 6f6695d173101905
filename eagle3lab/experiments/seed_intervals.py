"""The mean over seeds with Student's interval: few runs, each of them one draw."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class SeedMean:
    """A mean over runs that differ in seeds alone. `low` and `high` are None for one run: it shows no spread."""

    mean: float
    low: float | None
    high: float | None
    num_runs: int


def seed_mean(values: Sequence[float]) -> SeedMean | None:
    """Mean and 95 % interval, mean +- t(n-1) * s / sqrt(n); None for no value."""
    if not values:
        return None
    mean, num = statistics.fmean(values), len(values)
    if num == 1:
        return SeedMean(mean, None, None, 1)
    half = student_quantile(num - 1) * statistics.stdev(values) / math.sqrt(num)
    return SeedMean(mean, mean - half, mean + half, num)


def student_quantile(degrees: int, confidence: float = CONFIDENCE) -> float:
    """t for which P(|T| <= t) = `confidence` with `degrees` >= 1 degrees of freedom."""
    assert degrees >= 1
    low, high = 0.0, 1.0
    while _two_sided(high, degrees) < confidence:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _two_sided(middle, degrees) < confidence else (low, middle)
    return high


def _two_sided(t: float, degrees: int) -> float:
    """P(|T| <= t): Abramowitz and Stegun, 26.7.3 (odd) and 26.7.4 (even)."""
    angle = math.atan(t / math.sqrt(degrees))
    cosine, odd = math.cos(angle), degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    whole = math.sin(angle) * total
    return 2 / math.pi * (angle + whole) if odd else whole
