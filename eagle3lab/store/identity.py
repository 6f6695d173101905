"""Content hashes that name a row and a plan of rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np


class PlannedRow(Protocol):
    """What the store needs to know of a row; `eagle3lab.rows` builds them."""

    @property
    def row_id(self) -> str: ...
    @property
    def conversation_id(self) -> str: ...
    @property
    def split(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def input_ids(self) -> Sequence[int]: ...
    @property
    def loss_mask(self) -> Sequence[int]: ...


def row_id_of(input_ids: Any, loss_mask: Any) -> str:
    """The identity of a row: sha256 of its ids (little-endian int64) followed by its mask (uint8).

    Both are sequences, arrays or CPU tensors of shape [T]; the mask holds only 0 and 1.
    Raises ValueError when the shapes differ or the mask holds anything else.
    """
    ids = np.ascontiguousarray(input_ids, dtype="<i8")
    mask = np.ascontiguousarray(loss_mask, dtype=np.uint8)
    if ids.ndim != 1 or ids.shape != mask.shape:
        raise ValueError(f"input_ids {ids.shape} and loss_mask {mask.shape} must both be [T]")
    if mask.size and int(mask.max()) > 1:
        raise ValueError("loss_mask holds values other than 0 and 1")
    digest = hashlib.sha256(ids.tobytes())
    digest.update(mask.tobytes())
    return digest.hexdigest()


def plan_hash(rows: Iterable[tuple[str, str, str, int, int]]) -> str:
    """Sha256 over (row_id, conversation_id, split, length, supervised) of every row, in order.

    Where a row came from is left out: the same rows from a moved file are the same plan.
    """
    digest = hashlib.sha256()
    for row in rows:
        digest.update(("\t".join(map(str, row)) + "\n").encode())
    return digest.hexdigest()


def ids_sha256(token_ids: Sequence[int]) -> str:
    """Hex sha256 of token ids [T] as little-endian int64."""
    return hashlib.sha256(np.asarray(token_ids, dtype="<i8").tobytes()).hexdigest()
