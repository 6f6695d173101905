"""Which blocks of queries and keys FlexAttention visits, found from the blocks' ranges of documents and positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 128  # FlexAttention's block of queries and of keys

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class BlockLists:
    """Per block of queries: how many blocks of keys it needs, and which come first in `indices`.

    `partial` blocks are masked element by element, `full` ones not at all.
    """

    window: int | None
    num_partial: Tensor  # shape: [1, 1, num_queries / BLOCK], int32
    partial: Tensor  # shape: [1, 1, num_queries / BLOCK, num_keys / BLOCK], int32
    num_full: Tensor  # like num_partial
    full: Tensor  # like partial
    query_num_partial: Tensor  # the same by blocks of keys; shape: [1, 1, num_keys / BLOCK]
    query_partial: Tensor  # shape: [1, 1, num_keys / BLOCK, num_queries / BLOCK]
    query_num_full: Tensor
    query_full: Tensor
    query_position: Tensor  # shape: [num_queries], int32
    query_document: Tensor  # shape: [num_queries], int32; -2 for a query that sees nothing
    key_position: Tensor  # shape: [num_keys], int32
    key_document: Tensor  # shape: [num_keys], int32; -1 for a key that is never seen

    def map(self, function: Callable[[Tensor], Tensor]) -> BlockLists:
        """The same lists with `function` applied to every tensor."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return BlockLists(**{k: function(v) if isinstance(v, Tensor) else v for k, v in values.items()})


def block_lists(
    query_position: Ints,
    query_document: Ints,
    key_position: Ints,
    key_document: Ints,
    window: int | None,
    *,
    num_queries: int,
    num_keys: int,
) -> BlockLists:
    """Blocks for causal attention inside documents. Documents of keys are -1 where a key is never seen.

    A query sees the keys of its document not after it, and with a window only the last `window` of them.
    Queries and keys are filled up to `num_queries` and `num_keys`, multiples of BLOCK. A block is listed where
    the ranges of its documents and positions allow a pair: never too few, and as good as exact for ascending
    positions.
    """
    query_position, query_document = (
        _filled(query_position, num_queries, 0),
        _filled(query_document, num_queries, -2),
    )
    key_position, key_document = _filled(key_position, num_keys, 0), _filled(key_document, num_keys, -1)
    q_pos, q_doc = query_position.reshape(-1, BLOCK), query_document.reshape(-1, BLOCK)
    k_pos, k_doc = key_position.reshape(-1, BLOCK), key_document.reshape(-1, BLOCK)
    q_low, q_high = q_pos.min(1)[:, None], q_pos.max(1)[:, None]
    k_low, k_high = k_pos.min(1)[None], k_pos.max(1)[None]
    first, last = q_doc.min(1)[:, None], q_doc.max(1)[:, None]
    k_first, k_last = k_doc.min(1)[None], k_doc.max(1)[None]

    needed = (first <= k_last) & (k_first <= last) & (k_low <= q_high)
    full = (first == last) & (k_first == k_last) & (first == k_first) & (k_high <= q_low)
    if window is not None:
        needed &= k_high > q_low - window
        full &= k_low > q_high - window
    partial = needed & ~full
    lists = [*_lists(partial), *_lists(full), *_lists(partial.T), *_lists(full.T)]
    elements = [query_position, query_document, key_position, key_document]
    as_tensors = [torch.from_numpy(e.astype(np.int32)) for e in elements]
    return BlockLists(window, *lists, *as_tensors)


def _filled(values: Ints, size: int, value: int) -> Ints:
    return np.concatenate([values, np.full(size - values.size, value, values.dtype)])


def _lists(chosen: NDArray[np.bool_]) -> tuple[Tensor, Tensor]:
    order = np.argsort(~chosen, axis=1, kind="stable").astype(np.int32)
    counts = chosen.sum(axis=1).astype(np.int32)
    return torch.from_numpy(counts)[None, None], torch.from_numpy(order)[None, None]
