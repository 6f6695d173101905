from __future__ import annotations

import pytest

from eagle3lab.evaluate.acceptance import AcceptanceCounts, summarise


def test_counts_per_position_from_steps():
    assert AcceptanceCounts.from_steps([3, 0, 2, 1, 3], 3) == AcceptanceCounts(5, (4, 3, 2))
    assert AcceptanceCounts.from_steps([], 2) == AcceptanceCounts(0, (0, 0))


def test_prompts_are_pooled_by_step_and_not_averaged():
    stats = summarise([AcceptanceCounts(1, (1, 1)), AcceptanceCounts(9, (0, 0))])
    assert stats.acceptance_length == pytest.approx(1.2)
    assert stats.num_prompts == 2
    assert stats.acceptance_length_low <= 1.2 <= stats.acceptance_length_high


def test_equal_prompts_have_an_interval_of_no_width_and_seeds_repeat():
    stats = summarise([AcceptanceCounts(10, (5, 2))] * 4)
    assert stats.acceptance_length_low == stats.acceptance_length_high == pytest.approx(1.7)
    uneven = [AcceptanceCounts(10, (n, 0)) for n in (1, 5, 9)]
    assert summarise(uneven, seed=3) == summarise(uneven, seed=3)


def test_nothing_counted_is_none_and_not_zero():
    stats = summarise([AcceptanceCounts(0, (0, 0))])
    assert stats.acceptance_length is None
    assert stats.draft_acceptance_rate is None
    assert stats.conditional_acceptance == (None, None)
    assert summarise([AcceptanceCounts(4, (0, 0))]).conditional_acceptance == (0.0, None)


def test_counts_of_different_k_do_not_mix():
    with pytest.raises(ValueError, match="another number"):
        summarise([AcceptanceCounts(1, (1,)), AcceptanceCounts(1, (1, 0))])
    with pytest.raises(ValueError, match="no counts"):
        summarise([])
