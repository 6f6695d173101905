"""Row and plan hashes."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest
import torch

from eagle3lab.store.identity import plan_hash, row_id_of


def test_row_id_is_sha256_of_int64_ids_then_uint8_mask() -> None:
    by_hand = hashlib.sha256(struct.pack("<3q", 7, 0, 151935) + bytes([0, 1, 1])).hexdigest()
    assert row_id_of((7, 0, 151935), (0, 1, 1)) == by_hand


def test_row_id_does_not_depend_on_the_container() -> None:
    ids, mask = [3, 1, 2], [1, 0, 1]
    expected = row_id_of(ids, mask)
    assert row_id_of(torch.tensor(ids, dtype=torch.int32), torch.tensor(mask, dtype=torch.bool)) == expected
    assert row_id_of(np.array(ids), np.array(mask, dtype=np.int64)) == expected


@pytest.mark.parametrize(("ids", "mask"), [([1, 2], [1]), ([1, 2], [1, 2]), ([[1, 2]], [[1, 0]])])
def test_row_id_refuses_what_is_not_ids_and_a_mask(ids: list, mask: list) -> None:
    with pytest.raises(ValueError, match=r"mask"):
        row_id_of(ids, mask)


def test_plan_hash_sees_order_split_and_counts() -> None:
    rows = [("a", "c1", "train", 5, 2), ("b", "c2", "train", 6, 3)]
    variants = [
        rows,
        rows[::-1],
        rows[:1],
        [("a", "c1", "validation", 5, 2), rows[1]],
        [("a", "c1", "train", 5, 1), rows[1]],
    ]
    assert len({plan_hash(v) for v in variants}) == len(variants)
