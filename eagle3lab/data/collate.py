"""Joins the rows of one pack into one padded sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from eagle3lab.data.shift import LAST_KEPT, SCALES, STATES, Batch

PADDING_DOCUMENT = -1
_PER_ROW = ("lengths", "row_index")
_OF_KEPT = (STATES[1], STATES[1] + SCALES)  # in place of every position, beside LAST_KEPT

Places = list[tuple[int, int]]  # [start, end) in a pack, ascending


def create_collate_fn(max_len: int, *, pin_memory: bool = False) -> Callable[[Sequence[Batch]], Batch]:
    """A picklable collate function that packs samples into one sequence of exactly `max_len`.

    Its result: input_ids, loss_mask, position_ids, document_ids [1, max_len] (document_ids: position in
    the pack, -1 on padding), hidden_states [1, max_len, n_aux * hidden], verifier_last_hidden_states
    [1, max_len, hidden], lengths [n], row_index [n]. It raises ValueError for samples that do not fit
    or differ in width or dtype: nothing is ever cut. `pin_memory`: the tensors of max_len lie in page-locked
    memory, from where a GPU copies without waiting.
    """
    return partial(collate_rows, max_len=max_len, pin_memory=pin_memory)


def collate_rows(samples: Sequence[Batch], max_len: int, pin_memory: bool = False) -> Batch:
    """See `create_collate_fn`."""
    if not samples:
        raise ValueError("a pack needs at least one row")
    lengths = torch.cat([sample["lengths"] for sample in samples])  # shape: [n]
    total = int(lengths.sum())
    if total > max_len:
        raise ValueError(f"rows of {lengths.tolist()} tokens make {total}, more than the pack's {max_len}")
    starts = (lengths.cumsum(0) - lengths).tolist()
    everywhere = [[(start, start + n)] for start, n in zip(starts, lengths.tolist(), strict=True)]
    kept = everywhere
    if LAST_KEPT in samples[0]:
        kept = [_runs(sample[LAST_KEPT], start) for sample, start in zip(samples, starts, strict=True)]
    batch: Batch = {}
    for name in samples[0]:
        parts = [sample[name] for sample in samples]
        places = kept if name in _OF_KEPT else everywhere
        batch[name] = (
            torch.cat(parts) if name in _PER_ROW else _pack(name, parts, places, max_len, pin_memory)
        )
    document_ids = torch.full((max_len,), PADDING_DOCUMENT, dtype=torch.long, pin_memory=pin_memory)
    document_ids[:total] = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    batch["document_ids"] = document_ids.unsqueeze(0)  # shape: [1, max_len]
    return batch


def _runs(marked: Tensor, start: int) -> Places:
    """The marked stretches of a row [L] that begins at `start` of its pack."""
    edges = np.flatnonzero(np.diff(marked.numpy().astype(np.int8), prepend=0, append=0)) + start
    return [(int(a), int(b)) for a, b in edges.reshape(-1, 2)]


def _pack(name: str, parts: Sequence[Tensor], places: Sequence[Places], max_len: int, pin: bool) -> Tensor:
    """Copy every part to its places, one after the other; zeros between and behind them: [1, max_len, ...]."""
    first = parts[0]
    packed = torch.empty((max_len, *first.shape[1:]), dtype=first.dtype, pin_memory=pin)
    end = 0  # of what is written
    for part, own in zip(parts, places, strict=True):
        length = sum(stop - start for start, stop in own)
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype or part.shape[0] != length:
            raise ValueError(
                f"{name}: a sample of {list(part.shape)} {part.dtype} does not go with "
                f"{[length, *first.shape[1:]]} {first.dtype}"
            )
        taken = 0
        for start, stop in own:
            packed[end:start] = 0
            # without the interpreter lock
            packed[start:stop].copy_(part[taken : taken + stop - start])
            taken, end = taken + stop - start, stop
    packed[end:] = 0
    return packed.unsqueeze(0)
