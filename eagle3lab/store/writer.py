"""Writes a store shard by shard. Interrupted and resumed gives the same bytes as uninterrupted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Generic

import torch
from safetensors.torch import save
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.store.answers import answers_files
from eagle3lab.store.checks import check_states, check_tokens, slot_names
from eagle3lab.store.claim import claimed, remove_leftovers
from eagle3lab.store.files import sha256_of, write_bytes
from eagle3lab.store.identity import plan_hash, row_id_of
from eagle3lab.store.index import (
    INDEX_FILE,
    TOKEN_COUNTS_FILE,
    RowEntry,
    ShardEntry,
    append_entry,
    read_index,
    shard_file,
    write_index,
)
from eagle3lab.store.last_states import kept_positions, num_kept
from eagle3lab.store.manifest import (
    Manifest,
    check_resumable,
    is_store,
    read_manifest,
    write_manifest,
)
from eagle3lab.store.partial import drop_all_partial
from eagle3lab.store.plan import RowT, count_supervised_tokens, plan_shards, shards_of_part
from eagle3lab.store.shards import (
    AUX,
    DTYPES,
    INPUT_IDS,
    LAST,
    LOSS_MASK,
    TOKEN_COUNTS,
    check_header,
    encode,
    write_shard,
)
from eagle3lab.store.trained_on import TRAINED_ON_FILE, trained_on, write_trained_on

_FROM_THE_PLAN = {TOKEN_COUNTS_FILE, TRAINED_ON_FILE}  # files that can be written again without any state

ROW_THREADS = 8  # check and encode rows, of whatever shards are being written


class StoreWriter(Generic[RowT]):
    """Writes the planned rows to a store; used as a context manager.

    with StoreWriter(path, manifest, rows, shard_tokens) as writer:
        for number, rows in writer.pending():
            writer.write_shard(number, [(row, aux, last, token_ids), ...])
        manifest = writer.finish()

    An existing store at `path` is continued: indexed shards are skipped, a torn last index line is cut,
    a shard that is not indexed is written again. `notes` says what of that was done, for the user.
    A manifest with `num_parts` > 1 makes this one part: only its own shards of the plan are pending.
    `user_turns`: see `trained_on.trained_on`; None where the texts behind the rows are not known.

    Raises UserError when `path` holds the store of another verifier, plan or layer ids (every differing
    field with both values), when it is no store, or when another process is writing it.
    """

    def __init__(
        self,
        path: Path,
        manifest: Manifest,
        rows: Sequence[RowT],
        shard_tokens: int,
        user_turns: Collection[int] | None = None,
    ) -> None:
        if shard_tokens < 1 or not rows:
            raise ValueError(f"{len(rows)} rows in shards of {shard_tokens} tokens make no store")
        self.path = Path(path)
        supervised = [sum(row.loss_mask) for row in rows]
        self.manifest = replace(
            manifest,
            num_rows=len(rows),
            num_tokens=sum(len(row.input_ids) for row in rows),
            num_supervised=sum(supervised),
            planned_rows_hash=plan_hash(
                (row.row_id, row.conversation_id, row.split, len(row.input_ids), count)
                for row, count in zip(rows, supervised, strict=True)
            ),
            shard_tokens=shard_tokens,
            complete=False,
        )
        self.notes: list[str] = []
        self._rows, self._user_turns = rows, user_turns
        self._entries: dict[int, ShardEntry] = {}
        self._claim: ExitStack | None = None
        self._index_lock = Lock()
        self.shards = plan_shards(rows, shard_tokens)
        shards_of_part(len(self.shards), manifest.part, manifest.num_parts)

    def __enter__(self) -> StoreWriter[RowT]:
        with ExitStack() as stack:
            self.notes += stack.enter_context(claimed(self.path))
            if is_store(self.path):
                self._continue()
            else:
                write_manifest(self.path, self.manifest)
                write_index(self.path, [])
            self.notes += remove_leftovers(self.path)
            self._pool = stack.enter_context(ThreadPoolExecutor(ROW_THREADS))
            self._claim = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        claim, self._claim = self._claim, None
        if claim is not None:
            claim.close()

    @property
    def num_tokens_done(self) -> int:
        """Tokens in indexed shards."""
        return sum(entry.num_tokens for entry in self._entries.values())

    def pending(self) -> Iterator[tuple[int, list[RowT]]]:
        """Number and rows of every shard that is still to be written, in order; of a part, its own ones."""
        for number in self._own():
            if number not in self._entries:
                yield number, self.shards[number]

    def write_shard(self, number: int, states: Sequence[tuple[RowT, Tensor, Tensor, Tensor]]) -> None:
        """Check, write and index one shard.

        states: (row, aux [T, n_aux * hidden], last [T, hidden], token_ids [T]) for exactly the planned
        rows in their order; CPU tensors of `DTYPES[manifest.dtype]` (bfloat16 for fp8). Raises IntegrityError
        when the token ids are not the row's or states, also those of them that are not kept, are short,
        non-finite, all zero or of another dtype; UserError when the disk is full. Nothing is indexed then.
        Several shards may be written at once.
        """
        assert self._claim is not None, "StoreWriter is used outside its `with` block"
        if [row.row_id for row, *_ in states] != [row.row_id for row in self.shards[number]]:
            raise ValueError(f"shard {number} must hold exactly its planned rows, in order")
        if number in self._entries:
            raise ValueError(f"shard {number} is written already")
        if number not in self._own():
            raise ValueError(f"shard {number} belongs to another part")
        rows: list[RowEntry] = []
        pieces: dict[str, list[Tensor]] = {}
        offset = 0
        for (row, *_), tensors in zip(states, self._pool.map(self._encode, states), strict=True):
            num_last = None if self.manifest.all_last_states else len(tensors[LAST])
            rows.append(
                RowEntry(
                    row.row_id,
                    row.conversation_id,
                    row.split,
                    row.source,
                    offset,
                    len(row.input_ids),
                    sum(row.loss_mask),
                    num_last,
                )
            )
            offset += len(row.input_ids)
            for name, tensor in tensors.items():
                pieces.setdefault(name, []).append(tensor)
        name = shard_file(number)
        digest = write_shard(self.path / name, self.manifest, number, pieces)
        entry = ShardEntry(name, digest, offset, tuple(rows))
        with self._index_lock:
            append_entry(self.path, entry)
            self._entries[number] = entry

    def finish(self) -> Manifest:
        """Write what follows from the plan alone and the complete manifest; returns the manifest.

        Raises ValueError while shards are pending.
        """
        missing = len(self._own()) - len(self._entries)
        if missing:
            raise ValueError(f"{missing} shards are not written yet")
        if self.manifest.complete:
            return self.manifest
        drop_all_partial(self.path)
        order = list(self._entries)
        if order != sorted(order):
            write_index(self.path, [self._entries[number] for number in sorted(order)])
        counts = count_supervised_tokens(self._rows, self.manifest.verifier.vocab_size)
        write_bytes(self.path / TOKEN_COUNTS_FILE, save({TOKEN_COUNTS: counts}))
        write_trained_on(self.path / TRAINED_ON_FILE, trained_on(self._rows, self._user_turns))
        names = [INDEX_FILE, TOKEN_COUNTS_FILE, TRAINED_ON_FILE, *answers_files(self.manifest.row_settings)]
        checksums = {name: sha256_of(self.path / name) for name in names}
        self.manifest = replace(self.manifest, complete=True, checksums=checksums)
        write_manifest(self.path, self.manifest)
        return self.manifest

    def _own(self) -> range:
        return shards_of_part(len(self.shards), self.manifest.part, self.manifest.num_parts)

    def _encode(self, states: tuple[RowT, Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
        """One row, checked, as it goes into its shard."""
        row, aux, last, token_ids = states
        ids = torch.tensor(row.input_ids, dtype=torch.int64)
        mask = torch.tensor(row.loss_mask, dtype=torch.uint8)
        self._check_row(row, ids, mask, aux, last, token_ids)
        if not self.manifest.all_last_states:
            last = last[kept_positions(mask)]
        return encode({INPUT_IDS: ids, LOSS_MASK: mask, AUX: aux, LAST: last}, self.manifest)

    def _holds(self, name: str, sha256: str) -> bool:
        return (self.path / name).is_file() and sha256_of(self.path / name) == sha256

    def _num_last(self, row: RowT) -> int | None:
        return None if self.manifest.all_last_states else num_kept(row.loss_mask)

    def _check_row(
        self, row: RowT, ids: Tensor, mask: Tensor, aux: Tensor, last: Tensor, token_ids: Tensor
    ) -> None:
        where = f"row {row.row_id[:12]} ({row.source})"
        if row_id_of(ids, mask) != row.row_id:
            raise IntegrityError(Problem(f"{where}: its ids and mask are not those its row_id was made of"))
        low, high, largest = int(ids.min()), int(ids.max()), self.manifest.verifier.vocab_size - 1
        if low < 0 or high > largest:
            raise IntegrityError(Problem(f"{where}: token ids", [low, high], expected=f"0 to {largest}"))
        check_tokens(ids, token_ids, where)
        check_states(
            aux,
            last,
            length=len(ids),
            hidden_size=self.manifest.verifier.hidden_size,
            slots=slot_names(self.manifest.layer_ids),
            dtype=DTYPES[self.manifest.dtype],
            where=where,
        )

    def _continue(self) -> None:
        stored = read_manifest(self.path)
        wanted = self.manifest
        check_resumable(self.path, stored, wanted)
        entries, torn = read_index(self.path)
        if stored.complete:
            self.manifest = stored
            self.shards = plan_shards(self._rows, stored.shard_tokens)
        if torn:
            self.notes.append(f"cut the last line of {INDEX_FILE}, torn by an interrupted run")
        for entry in entries:
            planned = self.shards[entry.number] if entry.number in self._own() else []
            wanted_rows = [(row.row_id, self._num_last(row)) for row in planned]
            if wanted_rows != [(row.row_id, row.num_last_states) for row in entry.rows]:
                raise IntegrityError(Problem(f"{self.path}: {entry.file} does not hold its planned rows"))
            try:
                check_header(self.path / entry.file, self.manifest, entry)
            except IntegrityError as error:
                self.notes.append(f"writing {entry.file} again: {error}")
            else:
                self._entries[entry.number] = entry
        missing = len(self._entries) < len(self._own())
        other = [name for name, sha256 in self.manifest.checksums.items() if not self._holds(name, sha256)]
        recount = bool(other) and set(other) <= _FROM_THE_PLAN
        if recount:
            self.notes += [f"writing {name} again: it is missing or damaged" for name in other]
        if self.manifest.complete and (missing or recount):
            self.manifest = replace(self.manifest, complete=False, checksums={})
            if missing:
                check_resumable(self.path, self.manifest, wanted)
        if torn or len(self._entries) != len(entries) or not (self.path / INDEX_FILE).exists():
            write_manifest(self.path, self.manifest)
            write_index(self.path, list(self._entries.values()))
