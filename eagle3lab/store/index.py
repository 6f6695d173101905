"""`index.jsonl`: one line for every shard that is whole. What is indexed is complete."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import DAMAGED_JSON, IntegrityError, Problem
from eagle3lab.store.files import append_durably, write_text
from eagle3lab.store.identity import plan_hash
from eagle3lab.store.manifest import Manifest

INDEX_FILE = "index.jsonl"
TOKEN_COUNTS_FILE = "token_counts.safetensors"
SHARD_DIRECTORY = "shards"


@dataclass(frozen=True, slots=True)
class RowEntry:
    """One row of a shard: tokens [offset, offset + length) of its tensors.

    num_last_states: how many of them have a last state, None for all; those lie in the row's order, behind
    those of the rows before it.
    """

    row_id: str
    conversation_id: str
    split: str
    source: str
    offset: int
    length: int
    supervised: int
    num_last_states: int | None = None

    @property
    def last_length(self) -> int:
        """Last states of the row."""
        return self.length if self.num_last_states is None else self.num_last_states


@dataclass(frozen=True)
class ShardEntry:
    """One line of the index."""

    file: str
    sha256: str
    num_tokens: int
    rows: tuple[RowEntry, ...]

    @property
    def number(self) -> int:
        return int(Path(self.file).stem)

    @property
    def num_last_states(self) -> int:
        """Last states of all its rows."""
        return sum(row.last_length for row in self.rows)

    def to_line(self) -> str:
        values = asdict(self)
        for row in values["rows"]:
            if row["num_last_states"] is None:
                del row["num_last_states"]
        return json.dumps(values, ensure_ascii=False, separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> ShardEntry:
        """Raises ValueError when the line is not one whole entry with contiguous rows."""
        try:
            values: dict[str, Any] = json.loads(line)
            rows = tuple(RowEntry(**row) for row in values.pop("rows"))
            entry = cls(rows=rows, **values)
            if entry.file != shard_file(entry.number):
                raise ValueError(f"{entry.file!r} is not the name of a shard")
            end = 0
            for row in rows:
                if row.offset != end or row.length < 1:
                    raise ValueError(f"row {row.row_id} does not start where the one before it ends")
                if not 0 <= row.last_length <= row.length:
                    raise ValueError(f"row {row.row_id} has {row.last_length} last states")
                end += row.length
            if end != entry.num_tokens:
                raise ValueError(f"the rows of {entry.file} have {end} tokens, not {entry.num_tokens}")
        except DAMAGED_JSON as error:
            raise ValueError(str(error)) from error
        return entry


def shard_file(number: int) -> str:
    """Path of a shard inside the store."""
    return f"{SHARD_DIRECTORY}/{number:05d}.safetensors"


def read_index(path: Path) -> tuple[list[ShardEntry], bool]:
    """Entries of `path/index.jsonl`, and whether its last line was torn by a kill and left out.

    Raises IntegrityError when any other line is damaged or a shard is listed twice.
    """
    file = path / INDEX_FILE
    if not file.exists():
        return [], False
    *lines, rest = file.read_bytes().split(b"\n")
    entries: list[ShardEntry] = []
    torn = bool(rest)
    for number, line in enumerate(lines, 1):
        try:
            entries.append(ShardEntry.from_line(line))
        except ValueError as error:
            if number < len(lines) or torn:
                raise IntegrityError(Problem(f"{file} line {number} is damaged ({error})")) from error
            torn = True
    if len({entry.file for entry in entries}) != len(entries):
        raise IntegrityError(Problem(f"{file} lists a shard twice"))
    return entries, torn


def check_totals(path: Path, manifest: Manifest, entries: Sequence[ShardEntry], torn: bool) -> None:
    """Raise IntegrityError unless the entries are the whole plan of the manifest, row for row and in order."""
    rows = [row for entry in entries for row in entry.rows]
    found = {
        "torn last index line": torn,
        "num_rows": len(rows),
        "num_tokens": sum(row.length for row in rows),
        "num_supervised": sum(row.supervised for row in rows),
        "planned_rows_hash": plan_hash(
            (row.row_id, row.conversation_id, row.split, row.length, row.supervised) for row in rows
        ),
    }
    expected = {name: getattr(manifest, name, False) for name in found}
    problems = [
        Problem(f"{path}: {name} of the index", value, expected=f"{expected[name]} as in the manifest")
        for name, value in found.items()
        if value != expected[name]
    ]
    if problems:
        raise IntegrityError(*problems)


def write_index(path: Path, entries: Sequence[ShardEntry]) -> None:
    """Replace the whole index, at once or not at all."""
    write_text(path / INDEX_FILE, "".join(entry.to_line() for entry in entries))


def append_entry(path: Path, entry: ShardEntry) -> None:
    """Add one line and fsync it. On a full disk the index is cut back to what it was."""
    append_durably(path / INDEX_FILE, entry.to_line().encode())
