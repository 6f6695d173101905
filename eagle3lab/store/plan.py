"""The deterministic plan of a store: which rows form which shard, and the totals that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError
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


def shards_of_part(num_shards: int, part: int, num_parts: int) -> range:
    """Numbers of the shards that one of several machines makes: every `num_parts`-th, from `part` on.

    Whole shards of the one plan, so that the joined store is the one that a single machine would write.
    Raises UserError when there are more parts than shards.
    """
    if num_parts > num_shards:
        raise UserError(
            Problem(
                f"extract.num_parts: the plan has {num_shards} shards",
                value=num_parts,
                expected="one shard at least for every part",
                fix=f"extract.num_parts={num_shards}, or a smaller extract.shard_tokens",
            )
        )
    return range(part, num_shards, num_parts)


def rows_of_part(rows: Sequence[RowT], shard_tokens: int, part: int, num_parts: int) -> list[RowT]:
    """The rows of one part's shards, in order."""
    shards = plan_shards(rows, shard_tokens)
    return [row for number in shards_of_part(len(shards), part, num_parts) for row in shards[number]]


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
