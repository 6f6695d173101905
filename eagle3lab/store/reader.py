"""Reads a store: opens it only when it is whole and what it says, then any row without the others."""

from __future__ import annotations

import os
import shlex
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.store.checks import check_states, slot_names
from eagle3lab.store.files import sha256_of
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.index import TOKEN_COUNTS_FILE, ShardEntry, check_totals, read_index, shard_file
from eagle3lab.store.last_states import kept_positions, spread
from eagle3lab.store.manifest import Manifest, is_store, read_manifest
from eagle3lab.store.shards import (
    AUX,
    DTYPES,
    FLOAT8,
    INPUT_IDS,
    LAST,
    LAST_KEPT,
    LOSS_MASK,
    TOKEN_COUNTS,
    check_header,
    check_stored_scales,
    decode,
    map_shard,
    open_shard,
    slice_states,
)

# mapped at once: rows are read in any order, and a mapping costs addresses and no file descriptor
_MAPPED_SHARDS = 256


@dataclass(frozen=True, slots=True)
class RowRecord:
    """Where a row lies. `length` and `supervised` count its tokens before any shift; `num_last_states` those
    that have a last state, in the shard from `last_offset` on."""

    row_id: str
    conversation_id: str
    split: str
    length: int
    supervised: int
    shard: int
    offset: int
    source: str
    last_offset: int
    num_last_states: int


class StoreReader:
    """A complete store, opened read-only. May be pickled and used in forked or spawned workers.

    verify="headers" holds index, manifest and every shard's header against each other; "full" also
    recomputes every shard's sha256. Raises UserError for a missing or unfinished store (the fix is the
    command that makes it), IntegrityError for one that is not what it says.
    """

    manifest: Manifest
    rows: list[RowRecord]

    def __init__(self, path: Path, verify: str = "headers", *, extract_command: str | None = None) -> None:
        if verify not in ("headers", "full"):
            raise ValueError(f"verify is {verify!r}, not 'headers' or 'full'")
        self.path = Path(path)
        self._shards: OrderedDict[int, dict[str, Tensor]] = OrderedDict()
        self._process = os.getpid()
        self._lock = Lock()
        command = extract_command or shlex.join(["python", "extract.py", f"store={self.path}"])
        if not is_store(self.path):
            raise UserError(
                Problem(
                    "there is no hidden-state store",
                    value=str(self.path),
                    expected="a directory written by extract.py",
                    fix=command,
                )
            )
        self.manifest = read_manifest(self.path)
        if self.manifest.num_parts > 1:
            raise UserError(
                Problem(
                    f"{self.path} is only part {self.manifest.part} of {self.manifest.num_parts} of a store",
                    expected="the joined store",
                    fix="python -m eagle3lab store merge WHOLE PART PART ...",
                )
            )
        if not self.manifest.complete:
            raise UserError(
                Problem(
                    f"the store {self.path} is not finished",
                    expected="one that extract.py has ended",
                    fix=f"{command}    (it goes on where it was stopped)",
                )
            )
        entries = self._read_index()
        for entry in entries:
            check_header(self.path / entry.file, self.manifest, entry)
        if verify == "full":
            self._check_bytes(entries)

    def __len__(self) -> int:
        return len(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_shards": OrderedDict(), "_lock": None, "_process": None}

    def indices(self, split: str) -> list[int]:
        """Positions in `rows` of one split, in store order."""
        return [i for i, row in enumerate(self.rows) if row.split == split]

    def read(
        self,
        i: int,
        columns: Sequence[int] | None = None,
        *,
        copy: bool = True,
        raw: bool = False,
        check: bool = True,
    ) -> dict[str, Tensor]:
        """One row as it was written, copied out of the mapped shard. Safe to call from several threads.

        `copy=False` may return states that lie in the mapped file: for a reader that copies them anyway, and
        never writes to them.
        `columns` selects aux slots by their position in `manifest.layer_ids` (default: all). Returns
        input_ids [T] int64, loss_mask [T] uint8, aux_hidden_states [T, n * hidden] and
        verifier_last_hidden_states [T, hidden] in the store's dtype, or in bfloat16 for an fp8 store; with
        `raw` that one gives float8_e4m3 states and their scales, aux_scales [T, n] and
        verifier_last_scales [T, 1], instead. Where the store keeps only the last states that training can use
        the others are zeros; with `raw` they are left out, so that the last states and their scales are
        [M, ...], and verifier_last_kept [T] bool says where they belong. `check=False` goes with `raw` and
        leaves the states' values to a reader that looks at them elsewhere (`data.raw.StateCheck`). Raises
        IntegrityError when the ids and mask do not hash to the row's id, a scale is not finite and positive,
        or a state is not finite or all zero.
        """
        if not (check or raw):
            raise ValueError("check=False is for raw states")
        record = self.rows[i]
        shard = self._open(record.shard)
        tokens = slice(record.offset, record.offset + record.length)
        last_states = slice(record.last_offset, record.last_offset + record.num_last_states)
        ids, mask = self.read_tokens(i)
        kept = None if self.manifest.all_last_states else self._kept(i, mask)
        layer_ids = self.manifest.layer_ids
        if columns is not None:
            layer_ids = tuple(layer_ids[c] for c in columns)
        stored = slice_states(shard, self.manifest, tokens, columns, last_states)
        if self.manifest.dtype == FLOAT8:
            check_stored_scales(stored, self._where(i))
        states = decode(stored, self.manifest) if check or not raw else stored
        if check:
            check_states(
                states[AUX],
                states[LAST],
                length=record.length,
                hidden_size=self.manifest.verifier.hidden_size,
                slots=slot_names(layer_ids),
                dtype=DTYPES[self.manifest.dtype],
                where=self._where(i),
                num_last=record.num_last_states,
            )
        if raw:
            states = stored
        if copy:  # a slice is a view into the whole mapped file, writable within this process
            states = {name: tensor.clone() for name, tensor in states.items()}
        if kept is not None:
            states = {**states, **({LAST_KEPT: kept} if raw else {LAST: spread(states[LAST], kept)})}
        return {INPUT_IDS: ids, LOSS_MASK: mask, **states}

    def read_mask(self, i: int) -> Tensor:
        """The loss mask of one row, [T] uint8, without its states."""
        return self.read_tokens(i)[1]

    def read_tokens(self, i: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and mask [T] uint8 of one row, without its states.

        Raises IntegrityError when they do not hash to the row's id.
        """
        record = self.rows[i]
        shard = self._open(record.shard)
        tokens = slice(record.offset, record.offset + record.length)
        ids = shard[INPUT_IDS][tokens].clone()
        mask = shard[LOSS_MASK][tokens].clone()
        if row_id_of(ids, mask) != record.row_id:
            raise IntegrityError(Problem(f"{self._where(i)}: ids and mask do not hash to its row id"))
        return ids, mask

    def token_counts(self) -> Tensor:
        """How often each id is a supervised token of the train split: [vocab_size] int64."""
        path = self.path / TOKEN_COUNTS_FILE
        with open_shard(path) as file:
            counts: Tensor = file.get_tensor(TOKEN_COUNTS)
        expected = sum(row.supervised for row in self.rows if row.split == "train")
        if tuple(counts.shape) != (self.manifest.verifier.vocab_size,) or int(counts.sum()) != expected:
            raise IntegrityError(
                Problem(
                    f"{path}: counts of {list(counts.shape)} ids, {int(counts.sum())} tokens",
                    expected=f"{self.manifest.verifier.vocab_size} ids, {expected} tokens",
                )
            )
        return counts

    def _read_index(self) -> list[ShardEntry]:
        entries, torn = read_index(self.path)
        self.rows = [record for entry in entries for record in _records(entry)]
        check_totals(self.path, self.manifest, entries, torn)
        for name, expected in self.manifest.checksums.items():
            digest = sha256_of(self.path / name)
            if digest != expected:
                raise IntegrityError(Problem(f"{self.path / name}: sha256", digest, expected=expected))
        return entries

    def _check_bytes(self, entries: Sequence[ShardEntry]) -> None:
        problems = []
        for entry in entries:
            digest = sha256_of(self.path / entry.file)
            if digest != entry.sha256:
                problems.append(Problem(f"{self.path / entry.file}: sha256", digest, expected=entry.sha256))
        if problems:
            raise IntegrityError(*problems)

    def _kept(self, i: int, mask: Tensor) -> Tensor:
        """Where row i has a last state, bool [T]: from its mask, held against the index."""
        kept, expected = kept_positions(mask), self.rows[i].num_last_states
        if int(kept.sum()) != expected:
            raise IntegrityError(
                Problem(
                    f"{self._where(i)}: last states by its mask", int(kept.sum()), f"{expected} as indexed"
                )
            )
        return kept

    def _open(self, number: int) -> dict[str, Tensor]:
        if self._process != os.getpid():
            self._shards, self._process, self._lock = OrderedDict(), os.getpid(), Lock()
        with self._lock:
            if number not in self._shards:
                self._shards[number] = map_shard(self.path / shard_file(number))
                if len(self._shards) > _MAPPED_SHARDS:
                    self._shards.popitem(last=False)
            self._shards.move_to_end(number)
            return self._shards[number]

    def _where(self, i: int) -> str:
        record = self.rows[i]
        return f"{self.path / shard_file(record.shard)}: row {record.row_id[:12]} ({record.source})"


def _records(entry: ShardEntry) -> Iterator[RowRecord]:
    last_offset = 0
    for row in entry.rows:
        yield RowRecord(
            row_id=row.row_id,
            conversation_id=row.conversation_id,
            split=row.split,
            length=row.length,
            supervised=row.supervised,
            shard=entry.number,
            offset=row.offset,
            source=row.source,
            last_offset=last_offset,
            num_last_states=row.last_length,
        )
        last_offset += row.last_length
