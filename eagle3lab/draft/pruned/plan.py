"""What one pack needs computed: made on the host from its masks alone, so that the device never waits for it.

A position's output past its step-0 key and value is used by its own later steps and by its loss, and by
nothing else. `rows` are the positions whose loss counts at some step, `context` those whose step-0 keys some
row sees. Nothing is computed anywhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3lab.config.schema import DraftConfig
from eagle3lab.draft.ttt import supervision_masks

from .block_lists import BLOCK, BlockLists, Ints, block_lists

Window = int | None

# FlexAttention is compiled per length: keys are filled up to the pack's, queries to one of so many lengths.
QUERY_SIZES = 4

ROW_BUCKET = 128  # on CUDA rows and context are padded to a multiple of it
PLAN = "plan"  # a batch's entry

ROWS, CONTEXT = "rows", "context"  # the two sets of queries


@dataclass(frozen=True)
class Group:
    """Queries and keys of one document, as ranges: `[query_start, query_end)`, `[key_start, key_end)`."""

    query_start: int
    query_end: int
    key_start: int
    key_end: int


@dataclass(frozen=True)
class PrunedPlan:
    """Index tensors of one pack. R rows and C context positions include padding, which repeats real ones.

    Padding is computed like its originals and weighs nothing; as a key it is never seen.
    """

    num_rows: int
    num_context: int
    rows: Tensor  # shape: [R], positions in the pack, ascending
    row_keys: Tensor  # shape: [R], the rows' places in `context`
    context: Tensor  # shape: [C], positions in the pack, ascending
    ahead: Tensor  # shape: [A], every rows + k inside the pack, ascending
    ahead_index: Tensor  # shape: [K, R], the place of rows + k in `ahead`
    ahead_places: Tensor  # shape: [K, A], the row of which that is rows + k, or -1
    targets: Tensor  # shape: [R], positions whose verifier state is a target, then padding
    target_index: Tensor  # shape: [K, R], the place of rows + k in `targets`; 0 where it does not count
    counted: Tensor  # shape: [K, R], bool; where the loss of a row counts
    supervised: Tensor  # shape: [K, S], bool, as `supervision_masks`
    groups: dict[str, tuple[Group, ...]]  # of the queries `rows` and `context`; without padding
    blocks: dict[tuple[str, Window], BlockLists]  # likewise, per attention window; on CUDA alone

    @property
    def ttt_steps(self) -> int:
        return self.counted.shape[0]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> PrunedPlan:
        """The same plan on `device`."""
        return self._map(lambda t: t.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> PrunedPlan:
        """The same plan in page-locked memory."""
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """As of a tensor: its memory must outlive the work queued on `stream`."""
        self._map(lambda t: (t.record_stream(stream), t)[1])

    def _map(self, function: Any) -> PrunedPlan:
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in values.items():
            if isinstance(value, Tensor):
                values[name] = function(value)
        values["blocks"] = {key: lists.map(function) for key, lists in self.blocks.items()}
        return PrunedPlan(**values)


def plan_preparer(
    draft: DraftConfig, *, cuda: bool, flex: bool
) -> Callable[[Mapping[str, Any]], dict[str, Any]]:
    """A function that makes the plan of a packed batch on the host, for `PackLoader`'s `prepare`."""
    windows = (draft.sliding_window,) * draft.num_layers

    def prepare(batch: Mapping[str, Any]) -> dict[str, Any]:
        masks = batch["document_ids"], batch["loss_mask"]
        return {
            PLAN: plan_pack(*masks, draft.ttt_steps, windows, bucket=ROW_BUCKET if cuda else 1, flex=flex)
        }

    return prepare


def plan_pack(
    document_ids: Tensor,
    loss_mask: Tensor,
    ttt_steps: int,
    windows: Sequence[Window] = (None,),
    *,
    bucket: int = 1,
    flex: bool = False,
) -> PrunedPlan:
    """The plan of one pack, on the CPU. document_ids, loss_mask: `[S]` or `[1, S]`, CPU tensors.

    windows: the sliding window of every layer, None where a layer sees its whole document. bucket: rows and
    context are padded to a multiple of it. flex: also list the blocks that FlexAttention needs.
    """
    documents = document_ids.reshape(-1)
    supervised = supervision_masks(loss_mask.reshape(-1), documents, ttt_steps)  # shape: [K, S]
    docs: Ints = documents.numpy().astype(np.int64)
    masks = supervised.numpy()
    seq_len = docs.size
    rows: Ints = np.flatnonzero(masks.any(axis=0))
    context = _context(docs, rows, windows)
    steps = np.arange(ttt_steps)[:, None]

    padded_rows, padded_context = _padded(rows, bucket), _padded(context, bucket)
    tokens = np.minimum(padded_rows + steps, seq_len - 1)  # shape: [K, R]
    ahead = np.unique(tokens)
    targets = np.flatnonzero(masks[0])
    place = np.zeros(seq_len + 1, np.int64)
    place[targets] = np.arange(targets.size)
    counted = np.zeros((ttt_steps, padded_rows.size), bool)
    counted[:, : rows.size] = masks[:, rows]
    padded_ahead = _padded(ahead, bucket)
    ahead_places = np.full((ttt_steps, padded_ahead.size), -1, np.int64)
    for k in range(ttt_steps):
        inside = np.flatnonzero(rows + k < seq_len)
        ahead_places[k, np.searchsorted(ahead, rows[inside] + k)] = inside
    blocks = {}
    if flex and rows.size:
        num_keys = _up(seq_len, BLOCK)
        sizes = {ROWS: _up(rows.size, _up(num_keys // QUERY_SIZES, BLOCK)), CONTEXT: num_keys}
        queries = {ROWS: rows, CONTEXT: context} if len(windows) > 1 else {ROWS: rows}
        blocks = {
            (name, window): block_lists(
                q, docs[q], context, docs[context], window, num_queries=sizes[name], num_keys=num_keys
            )
            for name, q in queries.items()
            for window in set(windows)
        }
    index = torch.from_numpy
    return PrunedPlan(
        num_rows=rows.size,
        num_context=context.size,
        rows=index(padded_rows),
        row_keys=index(np.searchsorted(context, padded_rows)),
        context=index(padded_context),
        ahead=index(padded_ahead),
        ahead_index=index(np.searchsorted(ahead, tokens)),
        ahead_places=index(ahead_places),
        targets=index(np.resize(targets, padded_rows.size) if targets.size else padded_rows),
        target_index=index(np.where(counted, place[tokens], 0)),
        counted=index(counted),
        supervised=supervised,
        groups={ROWS: _groups(docs, rows, context), CONTEXT: _groups(docs, context, context)},
        blocks=blocks,
    )


def _context(docs: Ints, rows: Ints, windows: Sequence[Window]) -> Ints:
    """Positions that some row sees, itself included: of its document, not after it, within the windows."""
    if not rows.size:
        return rows
    last = np.full(int(docs.max()) + 1, -1)
    np.maximum.at(last, docs[rows], rows)
    positions = np.arange(docs.size)
    seen = (docs >= 0) & (positions <= last[np.maximum(docs, 0)])
    if all(window is not None for window in windows) and _ascending(docs[seen]):
        # through every layer a row reaches back window - 1 positions further
        reach = sum(int(window or 0) - 1 for window in windows)
        following = rows[np.minimum(np.searchsorted(rows, positions), rows.size - 1)]
        seen &= following - positions <= reach
    return np.flatnonzero(seen)


def _groups(docs: Ints, queries: Ints, keys: Ints) -> tuple[Group, ...]:
    """One group per document; documents that are not in one piece all share a group."""
    if not queries.size:
        return ()
    if not _ascending(docs[keys]):
        return (Group(0, queries.size, 0, keys.size),)
    groups = []
    for document in np.unique(docs[queries]):
        q = np.searchsorted(docs[queries], [document, document + 1])
        k = np.searchsorted(docs[keys], [document, document + 1])
        groups.append(Group(int(q[0]), int(q[1]), int(k[0]), int(k[1])))
    return tuple(groups)


def _ascending(values: Ints) -> bool:
    return bool((np.diff(values) >= 0).all())


def _padded(positions: Ints, bucket: int) -> Ints:
    """Padding repeats the first positions in turn, so that no single one is written to by many."""
    return np.resize(positions, _up(positions.size, bucket))


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
