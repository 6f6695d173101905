"""Bootstrap of the pooled acceptance length: prompts are drawn, and runs where a variant has several seeds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
_DRAWS_AT_ONCE = 2_000_000  # bounds the memory, not the result

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Tally:
    """Verification steps and accepted drafted tokens of one variant: `[num_runs, num_prompts]` each."""

    drafts: Floats
    accepted: Floats

    @property
    def num_runs(self) -> int:
        return len(self.drafts)

    @property
    def length(self) -> float | None:
        """Tokens per verification step with the bonus token, over all runs and prompts; None without a step."""
        steps = self.drafts.sum()
        return float(1 + self.accepted.sum() / steps) if steps else None

    def at(self, prompts: NDArray[np.int64]) -> Tally:
        """The same of some prompts alone."""
        return Tally(self.drafts[:, prompts], self.accepted[:, prompts])


def resampled_lengths(variants: Sequence[Tally], *, seed: int, resamples: int) -> Floats:
    """Acceptance lengths `[num_variants, resamples]` of variants decoded over the same prompts.

    Prompts are drawn with replacement, in each resample the same ones for every variant: a difference of two
    rows is a paired one. Of the n > 1 runs of a variant n - 1 are drawn with replacement, for each variant
    by itself: with n of n the spread between few runs would come out too small by (n - 1) / n
    (rescaling bootstrap, J. N. K. Rao and C. F. J. Wu, JASA 83, 1988, section 2 with m = n - 1).
    A resample in which a variant has no verification step is NaN there.
    """
    num_prompts = variants[0].drafts.shape[1]
    if any(v.drafts.shape[1] != num_prompts or v.accepted.shape != v.drafts.shape for v in variants):
        raise ValueError("variants of other prompts")
    runs = [_run_draws(v.num_runs, resamples, [seed, i]) for i, v in enumerate(variants)]
    lengths = np.empty((len(variants), resamples))
    done = 0
    for times in _prompt_draws(num_prompts, resamples, seed):
        part = slice(done, done + len(times))
        for row, variant, drawn in zip(lengths, variants, runs, strict=True):
            steps = ((times @ variant.drafts.T) * drawn[part]).sum(1)
            accepted = ((times @ variant.accepted.T) * drawn[part]).sum(1)
            row[part] = 1 + np.divide(accepted, steps, out=np.full_like(steps, np.nan), where=steps > 0)
        done += len(times)
    return lengths


def percentile_interval(values: Floats) -> tuple[float, float] | None:
    """The middle 95 % of the values that are numbers; None where there is none."""
    known = values[~np.isnan(values)]
    if not known.size:
        return None
    low, high = np.quantile(known, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _prompt_draws(num_prompts: int, resamples: int, seed: int) -> Iterator[Floats]:
    """How often each prompt is drawn, `[a few resamples, num_prompts]` at a time."""
    rng = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // max(1, num_prompts))
    for first in range(0, resamples, at_once):
        rows = min(at_once, resamples - first)
        picks = rng.integers(0, num_prompts, (rows, num_prompts))
        cells = picks + num_prompts * np.arange(rows)[:, None]
        yield (
            np.bincount(cells.ravel(), minlength=rows * num_prompts).reshape(rows, num_prompts).astype(float)
        )


def _run_draws(num_runs: int, resamples: int, seed: Sequence[int]) -> Floats:
    """How often each run is drawn, `[resamples, num_runs]`."""
    if num_runs == 1:
        return np.ones((resamples, 1))
    picks = np.random.default_rng(seed).integers(0, num_runs, (resamples, num_runs - 1))
    return np.stack([(picks == run).sum(1) for run in range(num_runs)], axis=1).astype(float)
