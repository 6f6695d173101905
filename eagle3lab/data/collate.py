"""Joins the rows of one pack into one padded sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from eagle3lab.data.shift import Batch

PADDING_DOCUMENT = -1
_PER_ROW = ("lengths", "row_index")


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
    batch: Batch = {}
    for name in samples[0]:
        parts = [sample[name] for sample in samples]
        batch[name] = (
            torch.cat(parts) if name in _PER_ROW else _pack(name, parts, lengths, max_len, pin_memory)
        )
    document_ids = torch.full((max_len,), PADDING_DOCUMENT, dtype=torch.long, pin_memory=pin_memory)
    document_ids[:total] = torch.repeat_interleave(torch.arange(len(samples)), lengths)
    batch["document_ids"] = document_ids.unsqueeze(0)  # shape: [1, max_len]
    return batch


def _pack(name: str, parts: Sequence[Tensor], lengths: Tensor, max_len: int, pin_memory: bool) -> Tensor:
    """Copy the parts one after the other, then zeros: [1, max_len, ...]."""
    first = parts[0]
    packed = torch.empty((max_len, *first.shape[1:]), dtype=first.dtype, pin_memory=pin_memory)
    start = 0
    for part, length in zip(parts, lengths.tolist(), strict=True):
        if part.shape[1:] != first.shape[1:] or part.dtype != first.dtype or part.shape[0] != length:
            raise ValueError(
                f"{name}: a sample of {list(part.shape)} {part.dtype} does not go with "
                f"{[length, *first.shape[1:]]} {first.dtype}"
            )
        packed[start : start + length].copy_(part)  # without the interpreter lock
        start += length
    packed[start:] = 0
    return packed.unsqueeze(0)
