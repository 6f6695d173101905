"""The captured rows of a shard that lost others: kept beside the store until a later run completes it.

A file here is no part of the store: no index names it, no reader sees it, and the row ids inside are
compared with the plan before they are used. Without them a resumed run would capture every row of such a
shard again.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3lab.store.files import write_atomically
from eagle3lab.store.plan import RowT
from eagle3lab.store.stream import write_safetensors

PARTIAL_DIRECTORY = "partial"
_PARTS = ("aux", "last", "token_ids")

Captured = tuple[Tensor, Tensor, Tensor]  # aux [T, n_aux * hidden], last [T, hidden], token_ids [T]


def save_partial(store: Path, number: int, rows: Mapping[str, Captured]) -> None:
    """Keep the rows, by row id, of shard `number`; none to keep removes the file."""
    path = _file(store, number)
    if not rows:
        drop_partial(store, number)
        return
    path.parent.mkdir(exist_ok=True)
    tensors = {
        f"{part}.{row_id}": [tensor]
        for row_id, captured in rows.items()
        for part, tensor in zip(_PARTS, captured, strict=True)
    }
    write_atomically(path, lambda temporary: write_safetensors(temporary, tensors, {}))


def load_partial(store: Path, number: int, rows: Sequence[RowT]) -> dict[int, Captured]:
    """Position in the shard -> what was kept of it; a file that cannot be read counts as absent."""
    path = _file(store, number)
    if not path.is_file():
        return {}
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError):
        return {}
    kept = {}
    for i, row in enumerate(rows):
        found = [tensors.get(f"{part}.{row.row_id}") for part in _PARTS]
        aux, last, token_ids = found
        if aux is not None and last is not None and token_ids is not None:
            kept[i] = (aux, last, token_ids)
    return kept


def drop_partial(store: Path, number: int) -> None:
    """Remove what was kept of shard `number`, and the directory with its last file."""
    _file(store, number).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # absent, or not empty yet
        (store / PARTIAL_DIRECTORY).rmdir()


def drop_all_partial(store: Path) -> None:
    """Remove all that was kept, and what a kill left of it: no shard is pending any more."""
    shutil.rmtree(store / PARTIAL_DIRECTORY, ignore_errors=True)


def _file(store: Path, number: int) -> Path:
    return store / PARTIAL_DIRECTORY / f"{number:05d}.safetensors"
