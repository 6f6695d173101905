"""The batch sampler: fill, completeness, ranks, epochs, resume, speed."""

from __future__ import annotations

import time
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DataConfig
from eagle3lab.data.packing import PackBatchSampler, Unweighted
from eagle3lab.rows.readers import read_conversations


def realistic(
    count: int, median: int = 600, sigma: float = 0.9, max_len: int = 8192, seed: int = 0
) -> np.ndarray:
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, count).astype(np.int64) + 1
    return np.minimum(lengths, max_len)


def flat(packs: list[list[int]]) -> list[int]:
    return [row for pack in packs for row in pack]


@pytest.mark.parametrize(("median", "sigma"), [(600, 0.9), (600, 0.5), (1500, 0.8), (100, 1.2)])
def test_packs_are_97_percent_full_on_realistic_lengths(median: int, sigma: float) -> None:
    lengths = realistic(20_000, median, sigma)
    packs = PackBatchSampler(lengths, 8192).plan(0)
    assert lengths.sum() / (len(packs) * 8192) >= 0.97


@pytest.mark.parametrize("seq_len", [2048, 4096])
def test_packs_are_97_percent_full_on_the_lengths_of_the_shipped_conversations(seq_len: int) -> None:
    rows, _ = read_conversations(DataConfig(name="demo", paths=["asset:demo/conversations.jsonl.xz"]))
    # about four characters make a token, and a template adds a few to every message
    sizes = [sum(len(m["content"]) // 4 + 5 for m in row.messages) for row in rows]
    lengths = np.array([size for size in sizes if size <= 512])
    assert len(lengths) > 500
    packs = PackBatchSampler(lengths, seq_len).plan(0)
    assert lengths.sum() / (len(packs) * seq_len) >= 0.97


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=80),
    seed=st.integers(0, 3),
    shuffle=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_every_row_is_in_exactly_one_pack_and_no_pack_is_too_long(
    lengths: list[int], seed: int, shuffle: bool, epoch: int
) -> None:
    packs = PackBatchSampler(lengths, 50, seed=seed, shuffle=shuffle).plan(epoch)
    assert sorted(flat(packs)) == list(range(len(lengths)))
    assert all(pack and sum(lengths[row] for row in pack) <= 50 for pack in packs)
    assert len(packs) <= max(2 * sum(lengths) / 50 + 1, 1)  # no first- or best-fit needs twice the optimum


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=12, max_size=60),
    ranks=st.integers(1, 4),
    micro=st.integers(1, 3),
    drop_last=st.booleans(),
)
def test_ranks_are_disjoint_equal_and_follow_the_global_plan(
    lengths: list[int], ranks: int, micro: int, drop_last: bool
) -> None:
    lengths = [*lengths, 50, 50, 50, 50]
    samplers = [
        PackBatchSampler(
            lengths, 50, num_replicas=ranks, rank=rank, packs_per_update_per_rank=micro, drop_last=drop_last
        )
        for rank in range(ranks)
    ]
    plan = samplers[0].plan(0)
    batches = [list(sampler) for sampler in samplers]
    assert len({len(some) for some in batches}) == 1
    assert all(len(sampler) == len(batches[0]) for sampler in samplers)
    for number in range(len(batches[0])):
        update, m = divmod(number, micro)
        for rank in range(ranks):
            pack = update * ranks * micro + m * ranks + rank
            if pack < len(plan):
                assert batches[rank][number] == plan[pack]
            else:
                assert not drop_last
                assert all(isinstance(row, Unweighted) for row in batches[rank][number])
    used = [row for some in batches for pack in some for row in pack if not isinstance(row, Unweighted)]
    left_out = flat(plan[len(plan) - samplers[0].num_left_out :]) if samplers[0].num_left_out else []
    assert sorted(used + left_out) == list(range(len(lengths)))
    assert samplers[0].num_left_out == (len(plan) % ranks if drop_last else 0)
    assert samplers[0].num_updates == -(-len(batches[0]) // micro)


def test_the_global_plan_is_the_same_for_any_number_of_ranks() -> None:
    lengths = realistic(2000)
    plans = [
        PackBatchSampler(lengths, 8192, num_replicas=n, rank=n - 1, packs_per_update_per_rank=a, seed=3).plan(
            2
        )
        for n, a in ((1, 1), (2, 1), (8, 4))
    ]
    assert plans[0] == plans[1] == plans[2]


def test_the_same_seed_repeats_and_another_seed_or_epoch_differs() -> None:
    lengths = realistic(2000)
    one, two, other = (PackBatchSampler(lengths, 8192, seed=seed) for seed in (0, 0, 1))
    epochs = [one.plan(epoch) for epoch in range(3)]
    assert epochs == [two.plan(epoch) for epoch in range(3)]
    assert epochs[0] == one.plan(0)
    assert all(a != b for a, b in pairwise(epochs))
    assert other.plan(0) != epochs[0]


@pytest.mark.parametrize("count", [100, 2000])
def test_rows_meet_other_rows_in_the_next_epoch(count: int) -> None:
    sampler = PackBatchSampler(realistic(count), 8192)
    first, second = ({frozenset(pack) for pack in sampler.plan(e) if len(pack) > 1} for e in (0, 1))
    assert len(first & second) <= 0.05 * len(first)


def test_the_plan_is_pinned() -> None:
    """A resumed run needs the plan of the version that wrote the checkpoint."""
    lengths = [10, 20, 30, 40, 50, 25, 35, 45]
    assert PackBatchSampler(lengths, 64, seed=7).plan(1) == [[3, 1], [2], [7], [4, 0], [6, 5]]


def test_without_shuffle_every_epoch_has_the_same_plan() -> None:
    sampler = PackBatchSampler(realistic(500), 8192, shuffle=False)
    assert sampler.plan(0) == sampler.plan(5)


def test_a_hundred_thousand_rows_are_planned_in_two_seconds() -> None:
    lengths = realistic(100_000)
    start = time.process_time()
    PackBatchSampler(lengths, 8192).plan(0)
    assert time.process_time() - start < 2


def test_setting_the_epoch_changes_the_order_through_the_property_lightning_uses() -> None:
    sampler = PackBatchSampler(realistic(300), 8192)
    assert sampler.sampler is sampler
    first = list(sampler)
    assert list(sampler) == first
    sampler.sampler.set_epoch(1)
    assert list(sampler) == sampler.plan(1) != first


def test_resume_skips_the_packs_that_were_used_and_the_next_epoch_starts_anew() -> None:
    lengths = realistic(600, seed=4)
    make = {"num_replicas": 2, "packs_per_update_per_rank": 2, "seed": 5}
    whole, resumed = (PackBatchSampler(lengths, 8192, rank=1, **make) for _ in range(2))
    whole.set_epoch(3)
    resumed.set_epoch(3, start_pack=3 * 4)
    assert list(resumed) == list(whole)[3 * 2 :]
    assert len(resumed) == len(whole) == len(list(whole))
    resumed.set_epoch(3)
    assert list(resumed) == list(whole)[6:], "Lightning sets the same epoch again after a resume"
    resumed.set_epoch(4)
    whole.set_epoch(4)
    assert list(resumed) == list(whole)


def test_resume_at_the_end_of_an_epoch_yields_nothing() -> None:
    sampler = PackBatchSampler([10] * 7, 10, num_replicas=2, packs_per_update_per_rank=2)
    sampler.set_epoch(0, start_pack=6)
    assert list(sampler) == []


@pytest.mark.parametrize("start", [1, 2, 3, 8])
def test_resume_inside_an_update_or_beyond_the_epoch_is_refused(start: int) -> None:
    sampler = PackBatchSampler([10] * 7, 10, num_replicas=2, packs_per_update_per_rank=2)
    with pytest.raises(UserError, match="4 packs per update, at most 6"):
        sampler.set_epoch(0, start_pack=start)


def test_resume_with_other_ranks_and_the_same_packs_per_update_goes_on_in_the_same_order() -> None:
    lengths = realistic(400)
    two = [
        PackBatchSampler(lengths, 8192, num_replicas=2, rank=r, packs_per_update_per_rank=2) for r in (0, 1)
    ]
    one = PackBatchSampler(lengths, 8192, packs_per_update_per_rank=4)
    one.set_epoch(0, start_pack=8)
    assert list(one)[:4] == two[0].plan(0)[8:12]
    for update in range(two[0].num_updates - 1):
        assert one.rows_of_update(update) == two[0].rows_of_update(update) == two[1].rows_of_update(update)


def test_updates_and_their_rows_agree() -> None:
    lengths = realistic(700)
    sampler = PackBatchSampler(lengths, 8192, num_replicas=3, rank=1, packs_per_update_per_rank=2)
    for epoch in (0, 1):
        sampler.set_epoch(epoch)
        rows = [sampler.rows_of_update(update) for update in range(sampler.num_updates)]
        for update, some in enumerate(rows):
            assert all(sampler.update_of(row) == update for row in some)
        left_out = set(range(700)) - set(flat(rows))
        assert len(left_out) == len(flat(sampler.plan(epoch)[-sampler.num_left_out :])) * bool(
            sampler.num_left_out
        )
        for row in [*left_out, -1, 700]:
            with pytest.raises(KeyError):
                sampler.update_of(row)
        for number, pack in enumerate(sampler):
            assert {sampler.update_of(row) for row in pack} == {number // 2}
        with pytest.raises(IndexError):
            sampler.rows_of_update(sampler.num_updates)


def test_rows_of_an_update_never_hold_unweighted_rows() -> None:
    sampler = PackBatchSampler([10] * 7, 10, num_replicas=2, drop_last=False)
    assert sampler.num_updates == 4
    assert sorted(flat([sampler.rows_of_update(u) for u in range(4)])) == list(range(7))


def test_a_row_that_cannot_fit_names_train_seq_len() -> None:
    with pytest.raises(UserError, match=r"2 of 4 rows do not fit .* 300[\s\S]*train\.seq_len=384"):
        PackBatchSampler([100, 257, 300, 256], 256)


def test_too_few_packs_for_the_ranks_are_refused() -> None:
    with pytest.raises(
        UserError, match=r"3 rows make 1 packs of 100 tokens; expected at least one for each of the 2"
    ):
        PackBatchSampler([10, 20, 30], 100, num_replicas=2)
    with pytest.raises(UserError, match="no rows"):
        PackBatchSampler([], 100)


@pytest.mark.parametrize(
    "wrong", [{"rank": 2, "num_replicas": 2}, {"rank": -1}, {"packs_per_update_per_rank": 0}]
)
def test_an_impossible_layout_is_a_programming_error(wrong: dict) -> None:
    with pytest.raises(ValueError, match="rank"):
        PackBatchSampler([1, 2], 10, **wrong)
