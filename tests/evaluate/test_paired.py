"""Intervals and verdicts, against loops written by hand and against known differences."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3lab.evaluate.bootstrap import Tally, percentile_interval, resampled_lengths
from eagle3lab.evaluate.paired import Difference, compare_tallies, holm, p_value, verdict


def drawn_tally(
    rng: np.random.Generator, rate: np.ndarray, num_runs: int = 1, run_spread: float = 0.0
) -> Tally:
    """Counts of three drafted tokens a step, `rate [num_prompts]` of them accepted."""
    rates = np.clip(rate + rng.normal(0, run_spread, (num_runs, 1)), 0.01, 0.99)
    drafts = rng.integers(20, 60, rates.shape)
    return Tally(drafts.astype(float), rng.binomial(3 * drafts, rates).astype(float))


def loop_bootstrap(variants: list[Tally], resamples: int, seed: int) -> tuple[float, float]:
    """The difference of the last from the first, one resample and one draw at a time."""
    rng = np.random.default_rng(seed)
    num_prompts = variants[0].drafts.shape[1]
    found = []
    for _ in range(resamples):
        prompts = [int(rng.integers(num_prompts)) for _ in range(num_prompts)]
        lengths = []
        for v in variants:
            n = len(v.drafts)
            runs = [0] if n == 1 else [int(rng.integers(n)) for _ in range(n - 1)]
            steps = sum(v.drafts[r, p] for r in runs for p in prompts)
            lengths.append(1 + sum(v.accepted[r, p] for r in runs for p in prompts) / steps)
        found.append(lengths[-1] - lengths[0])
    found.sort()
    return found[int(0.025 * resamples)], found[int(0.975 * resamples)]


@pytest.mark.parametrize("num_runs", [(1, 1), (2, 1), (3, 4)])
def test_the_interval_is_that_of_a_loop_written_by_hand(num_runs: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    rate = rng.uniform(0.2, 0.5, 15)
    variants = [drawn_tally(rng, rate + 0.03 * i, n, 0.02) for i, n in enumerate(num_runs)]
    found = compare_tallies(variants).differences[1]
    assert found is not None
    low, high = loop_bootstrap(variants, 3_000, seed=11)
    # the ends of 3,000 resamples scatter by about 0.03 of the interval's width
    assert abs(found.low - low) < 0.1 * (high - low)
    assert abs(found.high - high) < 0.1 * (high - low)
    pooled = [1 + v.accepted.sum() / v.drafts.sum() for v in variants]
    assert found.estimate == pytest.approx(pooled[1] - pooled[0])


@pytest.mark.parametrize(("num_runs", "run_spread"), [(1, 0.0), (5, 0.01)])
def test_the_interval_covers_a_known_difference_as_often_as_it_says(num_runs: int, run_spread: float) -> None:
    rng = np.random.default_rng(7)
    covered = 0
    for i in range(200):
        rate = rng.beta(4, 8, 50)
        variants = [drawn_tally(rng, rate + shift, num_runs, run_spread) for shift in (0.0, 0.02)]
        found = compare_tallies(variants, seed=i, resamples=1_000).differences[1]
        assert found is not None
        covered += found.low <= 3 * 0.02 <= found.high
    assert 0.9 <= covered / 200 <= 0.99


def test_without_a_difference_one_is_shown_about_once_in_twenty_however_many_are_compared() -> None:
    rng = np.random.default_rng(5)
    wrong = 0
    for i in range(150):
        rate = rng.beta(4, 8, 40)
        compared = compare_tallies([drawn_tally(rng, rate) for _ in range(5)], seed=i, resamples=1_000)
        wrong += any(d is not None and d.shown for d in compared.differences)
    assert wrong / 150 <= 0.11


def test_pairing_by_prompt_narrows_the_difference() -> None:
    rng = np.random.default_rng(2)
    rate = rng.uniform(0.05, 0.9, 60)
    a, b = drawn_tally(rng, rate), drawn_tally(rng, rate + 0.03)
    paired = compare_tallies([a, b]).differences[1]
    shuffled = rng.permutation(60)
    unpaired = compare_tallies([a, b.at(shuffled)]).differences[1]
    assert paired is not None
    assert unpaired is not None
    assert paired.high - paired.low < 0.5 * (unpaired.high - unpaired.low)
    assert paired.estimate == pytest.approx(unpaired.estimate)


def test_seeds_that_differ_widen_the_interval() -> None:
    drafts = np.full((3, 30), 40.0)
    same = Tally(drafts, np.full((3, 30), 40.0))
    apart = Tally(drafts, np.array([[30.0], [40.0], [50.0]]) * np.ones(30))
    d_same, d_apart = (compare_tallies([same, v]).differences[1] for v in (same, apart))
    assert d_same is not None
    assert d_apart is not None
    assert (d_same.low, d_same.high, d_same.p_value) == (0.0, 0.0, 1.0)
    assert (d_apart.low, d_apart.high) == (-0.25, 0.25)
    # the spread of a mean of n runs is the unbiased one, s^2 / n
    lengths = resampled_lengths([apart, apart], seed=0, resamples=20_000)
    assert lengths[0].var() == pytest.approx(np.var([0.75, 1.0, 1.25], ddof=1) / 3, rel=0.03)
    # runs are drawn for every variant by itself
    assert abs(np.corrcoef(lengths)[0, 1]) < 0.03


def test_the_same_seed_repeats_and_another_variant_changes_no_draw() -> None:
    rng = np.random.default_rng(4)
    rate = rng.uniform(0.2, 0.5, 20)
    a, b, c = (drawn_tally(rng, rate, n) for n in (1, 3, 2))
    two, three = compare_tallies([a, b]), compare_tallies([a, b, c])
    assert two == compare_tallies([a, b])
    assert two.lengths == three.lengths[:2]
    assert two.differences[1].low == three.differences[1].low  # type: ignore[union-attr]
    assert two.lengths != compare_tallies([a, b], seed=1).lengths


def test_the_memory_bound_does_not_change_the_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3lab.evaluate import bootstrap

    tally = drawn_tally(np.random.default_rng(0), np.full(17, 0.4), 3)
    whole = resampled_lengths([tally], seed=0, resamples=500)
    monkeypatch.setattr(bootstrap, "_DRAWS_AT_ONCE", 100)
    assert np.array_equal(resampled_lengths([tally], seed=0, resamples=500), whole)


@pytest.mark.parametrize("shift", [0.0, 0.3, 1.9, 1.96, 2.0, 5.0, -1.9, -2.0])
def test_the_p_value_and_the_interval_agree(shift: float) -> None:
    drawn = np.random.default_rng(0).normal(shift, 1, 10_000)
    interval = percentile_interval(drawn)
    assert interval is not None
    assert (p_value(drawn) < 0.05) == (interval[0] > 0 or interval[1] < 0)
    assert 2 / 10_001 <= p_value(drawn) <= 1
    assert p_value(drawn) == p_value(-drawn)


def test_holm_by_hand() -> None:
    # 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.04 x 1 -> running maximum
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_variant_without_a_step_is_not_compared() -> None:
    some, nothing = Tally(np.full((1, 3), 4.0), np.ones((1, 3))), Tally(np.zeros((1, 3)), np.zeros((1, 3)))
    compared = compare_tallies([some, nothing, some])
    assert compared.differences[:2] == (None, None)
    assert compared.differences[2] is not None
    assert compared.lengths[1] is None
    assert verdict("B", "A", None) == "B and A cannot be compared: no verification step was counted"


def test_verdicts_in_words() -> None:
    def said(estimate: float, low: float, high: float, p: float, p_holm: float | None = None) -> str:
        return verdict("B", "A", Difference(estimate, low, high, p, p if p_holm is None else p_holm))

    assert said(0.12, 0.05, 0.19, 0.001) == "B accepts 0.12 more tokens per step than A [0.05, 0.19]"
    assert said(-0.12, -0.19, -0.05, 0.001) == "B accepts 0.12 fewer tokens per step than A [0.05, 0.19]"
    assert said(0.01, 0.002, 0.018, 0.01) == "B accepts 0.010 more tokens per step than A [0.002, 0.018]"
    assert said(0.02, -0.03, 0.07, 0.4) == "B against A: no difference shown (0.02 [-0.03, 0.07])"
    assert said(0.05, 0.01, 0.09, 0.03, 0.09) == (
        "B against A: no difference shown (0.05 [0.01, 0.09]; p 0.030 alone, 0.090 beside the others)"
    )
