"""Rows are grouped by the file they come from, under names that a metric can carry."""

from __future__ import annotations

import re

import pytest

from eagle3lab.data.domains import MAX_DOMAINS, Domains
from eagle3lab.data.packing import PackBatchSampler


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["asset:demo/conversations.jsonl.xz:1", "asset:demo/conversations.jsonl.xz:22"], ("conversations",)),
        (["/a/chat.jsonl:1", "/b/code.json:1"], ("chat", "code")),
        (["/a/chat/train.jsonl:1", "/a/code/train.jsonl:1"], ("chat_train", "code_train")),
        (["train.jsonl:1", "a/train.jsonl:1"], ("a_train", "train")),
        (["old/hs_0.safetensors", "old/hs_1.safetensors"], ("old",)),  # a file for every row
        (["C:\\a b.jsonl:1", "x.jsonl:2"], ("C_a_b", "x")),
        (["a b.jsonl:1", "a+b.jsonl:1", "a_b_2.jsonl:1"], ("a_b", "a_b_2", "a_b_2_2")),
        (["\u6587.jsonl:1", "\u5b57.jsonl:1"], ("rows", "rows_2")),
        ([], ()),
    ],
)
def test_a_domain_is_named_by_the_shortest_end_that_tells_it_apart(
    sources: list[str], names: tuple[str, ...]
) -> None:
    domains = Domains.of(sources)
    assert domains.names == names
    assert all(re.fullmatch(r"[A-Za-z0-9_-]+", name) for name in names)
    assert len(domains.of_row) == len(sources)
    assert domains.told_apart == (len(names) > 1)


def test_every_row_finds_its_domain() -> None:
    domains = Domains.of(["b.jsonl:1", "a.jsonl:1", "b.jsonl:2"])
    assert [domains.names[i] for i in domains.of_row] == ["b", "a", "b"]
    assert domains.num_rows() == [1, 2]


def test_too_many_files_are_not_told_apart() -> None:
    assert Domains.of([f"{i}.jsonl:1" for i in range(MAX_DOMAINS)]).told_apart
    assert not Domains.of([f"{i}.jsonl:1" for i in range(MAX_DOMAINS + 1)]).told_apart


def test_rows_of_two_groups_never_share_a_pack_and_no_row_is_lost() -> None:
    lengths, groups = [10] * 9, [0, 1, 2] * 3
    seen = []
    for rank in (0, 1):
        packs = PackBatchSampler(
            lengths, 25, num_replicas=2, rank=rank, shuffle=False, drop_last=False, groups=groups
        )
        seen += list(packs)
    assert all(len({groups[row] for row in pack}) == 1 for pack in seen)
    assert sorted(row for pack in seen for row in pack) == list(range(9))
