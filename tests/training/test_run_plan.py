from __future__ import annotations

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.data.packing import Unweighted
from eagle3lab.training.loader import PlannedBatches
from eagle3lab.training.run_plan import RunPlan, cut_updates

LENGTHS = [3, 5, 2, 4, 6, 1, 7]


def packs_of_epoch(epoch: int) -> list[list[int]]:
    """One row per pack, in an order that differs by epoch."""
    return [[(row + epoch) % len(LENGTHS)] for row in range(len(LENGTHS))]


def make(replicas: int = 1, micro: int = 2, **budget: int) -> RunPlan:
    return RunPlan(packs_of_epoch, LENGTHS, num_replicas=replicas, micro_batches=micro, **budget)


def test_an_epochs_last_update_takes_what_is_left() -> None:
    assert [len(u) for u in cut_updates([[i] for i in range(10)], 4)] == [4, 4, 2]


def test_ranks_are_disjoint_and_together_complete() -> None:
    plan = make(replicas=2, micro=2, max_epochs=1)
    ranks = [[row for pack in plan.packs_of_rank(rank) for row in pack] for rank in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 4
    weighted = [[row for row in rank if not isinstance(row, Unweighted)] for rank in ranks]
    assert sorted(weighted[0] + weighted[1]) == list(range(len(LENGTHS)))
    assert plan.update(1).row_index(1, rank=1) == (-1,)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_an_epoch_has_the_same_updates_for_any_number_of_ranks(replicas: int) -> None:
    plan = make(replicas=replicas, micro=4 // replicas, max_epochs=2)
    assert [plan.update(u).rows for u in range(plan.num_updates)] == [
        make(replicas=1, micro=4, max_epochs=2).update(u).rows for u in range(plan.num_updates)
    ]
    assert plan.num_tokens == 2 * sum(LENGTHS)


def test_the_same_updates_for_any_split_of_packs_over_ranks_and_micro_batches() -> None:
    one, two = make(replicas=1, micro=2, max_updates=3), make(replicas=2, micro=1, max_updates=3)
    assert [one.update(u).rows for u in range(3)] == [two.update(u).rows for u in range(3)]
    assert two.update(0).pack(0, rank=1) == one.update(0).pack(1, rank=0)


def test_the_first_budget_reached_ends_the_run() -> None:
    assert make(max_epochs=2).num_updates == 8
    assert make(max_epochs=2, max_updates=3).num_updates == 3
    tokens = make(max_epochs=5, max_tokens=9)
    assert (tokens.num_updates, tokens.num_tokens) == (2, 14)  # 8 tokens after one update are not 9


def test_tokens_are_counted_without_padding() -> None:
    plan = make(max_epochs=2)
    assert plan.num_tokens == 2 * sum(LENGTHS)
    assert [plan.tokens_after(n) for n in range(3)] == [0, 8, 14]
    assert plan.updates_for_tokens(9) == 2


def test_places_in_the_run_are_found_again() -> None:
    plan = make(max_epochs=3)
    assert [plan.locate(u) for u in (0, 3, 4, 11, 12)] == [(0, 0), (0, 3), (1, 0), (2, 3), (3, 0)]
    assert all(plan.find(*plan.locate(u)) == u for u in range(plan.num_updates + 1))
    assert [u for u in range(plan.num_updates) if plan.ends_epoch(u)] == [3, 7, 11]


def test_a_run_cut_in_mid_epoch_knows_where_a_longer_one_goes_on() -> None:
    assert make(max_updates=6).locate(6) == (1, 2)
    assert make(max_updates=12).find(1, 2) == 6


@pytest.mark.parametrize("start", [0, 1, 3, 4, 5])
def test_starting_later_gives_the_rest_of_the_same_batches(start: int) -> None:
    plan = make(max_epochs=2)
    everything, rest = list(PlannedBatches(plan, 0)), list(PlannedBatches(plan, 0, start))
    assert len(PlannedBatches(plan, 0, start)) == len(rest)
    assert everything[len(everything) - len(rest) :] == rest
    assert everything[: len(everything) - len(rest)] == [
        list(pack) for u in range(start) for pack in plan.update(u).packs
    ]


def test_fewer_packs_than_devices_is_an_error_that_says_how_many() -> None:
    with pytest.raises(UserError, match=r"7 rows in 7 packs for 8 devices"):
        make(replicas=8, max_epochs=1)


def test_a_run_without_a_budget_is_refused() -> None:
    with pytest.raises(UserError, match="nothing ends the run"):
        make()
