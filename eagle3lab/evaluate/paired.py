"""Paired differences of drafts decoded over the same prompts: estimate, interval, p-value, verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from eagle3lab.evaluate.bootstrap import CONFIDENCE, Floats, Tally, percentile_interval, resampled_lengths

RESAMPLES = 10_000
_DIGITS = range(2, 5)  # of a printed difference: two, or as many as its nearer end needs to differ from zero


@dataclass(frozen=True)
class Estimate:
    """Acceptance length of one variant with its 95 % interval."""

    length: float
    low: float
    high: float


@dataclass(frozen=True)
class Difference:
    """Acceptance length of a variant minus the baseline's, in tokens per verification step."""

    estimate: float
    low: float
    high: float
    p_value: float  # two-sided; the interval excludes 0 exactly where it is below 0.05
    p_holm: float  # the same beside the other variants compared with this baseline

    @property
    def shown(self) -> bool:
        return self.p_holm < 1 - CONFIDENCE


@dataclass(frozen=True)
class Compared:
    """Every variant over one set of prompts. None: no verification step. The baseline is the first variant."""

    num_prompts: int
    lengths: tuple[Estimate | None, ...]
    differences: tuple[Difference | None, ...]  # from the baseline; None for the baseline itself


def compare_tallies(variants: Sequence[Tally], *, seed: int = 0, resamples: int = RESAMPLES) -> Compared:
    """All variants against the first, paired by prompt, Holm's correction over the comparisons."""
    drawn = resampled_lengths(variants, seed=seed, resamples=resamples)
    lengths = tuple(_estimate(v.length, row) for v, row in zip(variants, drawn, strict=True))
    baseline = lengths[0]
    found: list[Difference | None] = [None]
    for length, row in zip(lengths[1:], drawn[1:], strict=True):
        if baseline is None or length is None:
            found.append(None)
            continue
        spread = row - drawn[0]
        low, high = percentile_interval(spread) or (np.nan, np.nan)
        p = p_value(spread)
        found.append(Difference(length.length - baseline.length, low, high, p, p))
    corrected = iter(holm([d.p_value for d in found if d]))
    differences = tuple(d and replace(d, p_holm=next(corrected)) for d in found)
    return Compared(variants[0].drafts.shape[1], lengths, differences)


def _estimate(length: float | None, drawn: Floats) -> Estimate | None:
    interval = percentile_interval(drawn)
    return None if length is None or interval is None else Estimate(length, *interval)


def p_value(differences: Floats) -> float:
    """Two-sided: the smallest a for which the percentile interval of level 1 - a excludes 0.

    Never below 2 / (n + 1): n resamples cannot tell smaller ones apart.
    """
    known = np.sort(differences[~np.isnan(differences)])
    tail = min(_share_up_to_zero(known), _share_up_to_zero(-known[::-1]))
    return float(min(1.0, max(2 * tail, 2 / (len(known) + 1))))


def _share_up_to_zero(ordered: Floats) -> float:
    """The quantile that is 0, between two values as `numpy.quantile` interpolates."""
    count = int(np.searchsorted(ordered, 0.0, side="right"))
    if count in (0, len(ordered)):
        return float(count > 0)
    below, above = ordered[count - 1], ordered[count]
    return float((count - 1 - below / (above - below)) / (len(ordered) - 1))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values (S. Holm, Scand. J. Statist. 6, 1979), in the order given."""
    adjusted = [0.0] * len(p_values)
    largest = 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, p_values[i] * (len(p_values) - rank)))
        adjusted[i] = largest
    return adjusted


def verdict(name: str, baseline: str, difference: Difference | None) -> str:
    """One sentence: which of the two accepts more, or that no difference is shown."""
    if difference is None:
        return f"{name} and {baseline} cannot be compared: no verification step was counted"
    d = difference
    if d.shown:
        sign = 1 if d.estimate > 0 else -1
        low, high = sorted((sign * d.low, sign * d.high))
        digits = next((n for n in _DIGITS if round(low, n) > 0), _DIGITS[-1])
        word = "more" if sign > 0 else "fewer"
        return (
            f"{name} accepts {sign * d.estimate:.{digits}f} {word} tokens per step than {baseline} "
            f"[{low:.{digits}f}, {high:.{digits}f}]"
        )
    beside = f"; p {d.p_value:.3f} alone, {d.p_holm:.3f} beside the others" if d.low > 0 or d.high < 0 else ""
    return (
        f"{name} against {baseline}: no difference shown "
        f"({d.estimate:.2f} [{d.low:.2f}, {d.high:.2f}]{beside})"
    )
