"""The deterministic plan of a store: which rows form which shard, and the totals that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eagle3lab.store.identity import PlannedRow

RowT = TypeVar("RowT", bound=PlannedRow)
_ROWS_AT_ONCE = 1024


def plan_shards(rows: Sequence[RowT], shard_tokens: int) -> list[list[RowT]]:
    """Consecutive rows, a new shard before the row that would exceed `shard_tokens` (one row at least)."""
    shards: list[list[RowT]] = []
    tokens = 0
    for row in rows:
        if not shards or tokens + len(row.input_ids) > shard_tokens:
            shards.append([])
            tokens = 0
        shards[-1].append(row)
        tokens += len(row.input_ids)
    return shards


def count_supervised_tokens(rows: Sequence[PlannedRow], vocab_size: int) -> Tensor:
    """How often each id is a supervised token of the train split: [vocab_size] int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    train = [row for row in rows if row.split == "train"]
    for start in range(0, len(train), _ROWS_AT_ONCE):
        some = train[start : start + _ROWS_AT_ONCE]
        ids = np.concatenate([np.asarray(row.input_ids, dtype=np.int64) for row in some])
        mask = np.concatenate([np.asarray(row.loss_mask, dtype=bool) for row in some])
        counts += np.bincount(ids[mask], minlength=vocab_size)
    return torch.from_numpy(counts)
