"""Joins the parts that several machines made into the store that one machine would have written."""

from __future__ import annotations

import glob
import os
import shutil
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from eagle3lab.config.errors import IntegrityError, Problem, UserError, raise_all
from eagle3lab.store.answers import answers_files
from eagle3lab.store.claim import claimed, remove_leftovers
from eagle3lab.store.files import sha256_of, write_atomically
from eagle3lab.store.index import (
    INDEX_FILE,
    TOKEN_COUNTS_FILE,
    ShardEntry,
    check_totals,
    read_index,
    write_index,
)
from eagle3lab.store.manifest import Manifest, is_store, read_manifest, write_manifest
from eagle3lab.store.trained_on import TRAINED_ON_FILE

_IN_COMMON = [f.name for f in fields(Manifest) if f.name not in ("part", "complete", "checksums")]


def part_directory(store: Path, part: int, num_parts: int) -> Path:
    """Where one part of `store` is written: beside it, under its name; a store in one go is itself."""
    return store if num_parts == 1 else store.with_name(f"{store.name}.part{part}of{num_parts}")


def parts_beside(whole: Path) -> list[Path]:
    """The directories that `part_directory` names for a store, those that are there.

    Raises UserError when there is none.
    """
    found = sorted(whole.parent.glob(f"{glob.escape(whole.name)}.part*of*"))
    if not found:
        expected = f"{part_directory(whole, 0, 2).name} and so on, written with extract.num_parts"
        raise UserError(Problem("there are no parts of this store", str(whole), expected))
    return found


def merge_parts(parts: Sequence[Path], whole: Path) -> Manifest:
    """Place the shards of all parts in `whole`, by hard link where the file system allows, else by copy.

    Every shard's sha256 is checked on the way. An interrupted merge is continued by the same call. Returns
    the manifest; the store is byte for byte the one that an extraction without parts writes.

    Raises UserError for parts that are missing, doubled, unfinished or not of one plan, and for a `whole`
    that is something else; IntegrityError for a part that is not what it says.
    """
    manifests = [_read_part(path) for path in parts]
    _check_parts(parts, manifests, whole)
    entries: dict[int, tuple[Path, ShardEntry]] = {}
    for path, manifest in zip(parts, manifests, strict=True):
        for entry in _read_entries(path, manifest):
            entries[entry.number] = (path, entry)
    order = [entries[number][1] for number in sorted(entries)]
    manifest = replace(manifests[0].of_whole(), complete=False)
    check_totals(whole, manifest, order, torn=False)

    with claimed(whole):
        if is_store(whole):
            _check_target(whole, manifest)
        else:
            write_manifest(whole, manifest)
        remove_leftovers(whole)
        for number in sorted(entries):
            path, entry = entries[number]
            _place(path / entry.file, whole / entry.file, entry.sha256)
        shared = _shared_files(manifests[0])
        for name in shared:
            _place(parts[0] / name, whole / name, manifests[0].checksums[name])
        write_index(whole, order)
        checksums = {name: sha256_of(whole / name) for name in (INDEX_FILE, *shared)}
        manifest = replace(manifest, complete=True, checksums=checksums)
        write_manifest(whole, manifest)
    return manifest


def _read_part(path: Path) -> Manifest:
    if not is_store(path):
        expected = "a directory written with extract.num_parts"
        raise UserError(Problem("there is no part of a store", str(path), expected))
    return read_manifest(path)


def _check_parts(parts: Sequence[Path], manifests: Sequence[Manifest], whole: Path) -> None:
    first, problems = manifests[0], []
    for path, manifest in zip(parts, manifests, strict=True):
        if not manifest.complete:
            fix = f"extract.part={manifest.part} extract.num_parts={manifest.num_parts} once more"
            problems.append(Problem(f"{path} is not finished", fix=fix))
        for name in _IN_COMMON:
            ours, theirs = getattr(first, name), getattr(manifest, name)
            if ours != theirs:
                problems.append(Problem(f"{path}: another {name}", theirs, f"{ours!r} as in {parts[0]}"))
        for name in _shared_files(first):
            ours, theirs = (m.checksums.get(name) for m in (first, manifest))
            if manifest.complete and first.complete and ours != theirs:
                problems.append(Problem(f"{path}: other {name}", theirs, f"{ours!r}"))
    given = [manifest.part for manifest in manifests]
    wanted = list(range(first.num_parts))
    if sorted(given) != wanted:
        missing = sorted(set(wanted) - set(given))
        doubled = sorted({part for part in given if given.count(part) > 1})
        words = [f"missing: {missing}"] * bool(missing) + [f"given twice: {doubled}"] * bool(doubled)
        fixes = [
            f"extract.part={part} extract.num_parts={first.num_parts}, which writes "
            f"{part_directory(whole, part, first.num_parts).name}"
            for part in missing
        ]
        problems.append(
            Problem(
                f"parts of {first.num_parts} ({', '.join(words)})",
                sorted(given),
                f"{wanted}",
                "\n         ".join(fixes),
            )
        )
    raise_all(problems)


def _shared_files(manifest: Manifest) -> list[str]:
    """The small files that every part holds whole; parts of an earlier version know no `TRAINED_ON_FILE`."""
    keys = [TRAINED_ON_FILE] if TRAINED_ON_FILE in manifest.checksums else []
    return [TOKEN_COUNTS_FILE, *keys, *answers_files(manifest.row_settings)]


def _read_entries(path: Path, manifest: Manifest) -> list[ShardEntry]:
    digest = sha256_of(path / INDEX_FILE)
    if digest != manifest.checksums.get(INDEX_FILE):
        expected = str(manifest.checksums.get(INDEX_FILE))
        raise IntegrityError(Problem(f"{path / INDEX_FILE}: sha256", digest, expected))
    entries, _ = read_index(path)
    foreign = [entry.file for entry in entries if entry.number % manifest.num_parts != manifest.part]
    if foreign:
        raise IntegrityError(Problem(f"{path} holds shards of other parts", foreign[:3]))
    return entries


def _check_target(whole: Path, manifest: Manifest) -> None:
    stored = read_manifest(whole)
    if stored.of_whole() != manifest.of_whole() or stored.num_parts > 1:
        raise UserError(
            Problem(f"{whole} holds a store of something else", fix="another directory for the whole")
        )


def _place(source: Path, target: Path, sha256: str) -> None:
    """Link or copy one file to its final name and check its bytes; what is there already is only checked."""

    def link_or_copy(temporary: Path) -> None:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)
        digest = sha256_of(temporary)
        if digest != sha256:
            raise IntegrityError(Problem(f"{source}: sha256", digest, expected=sha256))

    if not (target.is_file() and sha256_of(target) == sha256):
        write_atomically(target, link_or_copy)
