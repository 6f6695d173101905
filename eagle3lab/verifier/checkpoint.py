"""The safetensors files of a checkpoint: which they are, what they hold, and a fingerprint. No torch."""

from __future__ import annotations

import hashlib
import json
import re
import struct
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import DAMAGED_JSON, IntegrityError, Problem, UserError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Enough to tell fine-tuned siblings apart in every tensor, little enough to read 200,000 of them.
FINGERPRINT_BYTES = 1024

_HEADER_LIMIT = 100 * 1024 * 1024  # the format's own
_SHARD_NUMBER = re.compile(r"-(\d+)-of-(\d+)\.safetensors$")


@dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: bytes `start` to `end` of `file`; `dtype` in safetensors' words (BF16)."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def tensor_index(path: Path) -> dict[str, TensorEntry]:
    """Every tensor of the checkpoint in `path`, by name; reads headers only.

    A single `model.safetensors`, else the files of `model.safetensors.index.json`, else all
    `*.safetensors` of the directory. Raises `UserError` for missing files, `IntegrityError` for damaged ones.
    """
    weight_map = _weight_map(path)
    if weight_map is None:
        return _merged(_files_without_index(path))
    missing = sorted({f for f in weight_map.values() if not (path / f).is_file()})
    if missing:
        raise _incomplete(f"{path / INDEX_NAME} names {len(missing)} files that are not there", missing)
    held = _merged([path / f for f in sorted(set(weight_map.values()))])
    wrong = sorted(n for n, f in weight_map.items() if n not in held or held[n].file.name != Path(f).name)
    if wrong:
        raise IntegrityError(
            Problem(f"{path / INDEX_NAME} puts {len(wrong)} tensors in files that do not hold them", wrong[0])
        )
    return {name: held[name] for name in weight_map}


def weight_fingerprint(path: Path) -> str:
    """sha256 over name, dtype, shape and leading bytes of every tensor of the checkpoint in `path`.

    Fast (kilobytes per tensor), independent of how tensors are spread over files, and different for
    another checkpoint of the same shapes. It does not prove that every byte is intact.
    """
    by_file: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in tensor_index(path).values():
        by_file[entry.file].append(entry)
    digests: dict[str, bytes] = {}
    for file, entries in by_file.items():
        with file.open("rb") as stream:
            for entry in sorted(entries, key=lambda e: e.start):
                stream.seek(entry.start)
                head = stream.read(min(FINGERPRINT_BYTES, entry.end - entry.start))
                digests[entry.name] = hashlib.sha256(
                    json.dumps([entry.name, entry.dtype, entry.shape]).encode() + head
                ).digest()
    return hashlib.sha256(b"".join(digests[name] for name in sorted(digests))).hexdigest()


def read_header(file: Path) -> list[TensorEntry]:
    """The tensors of one safetensors file; raises `IntegrityError` where it is cut short or no such file."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        if prefix == b"version ":
            raise IntegrityError(
                Problem(f"{file} is a Git LFS pointer", None, "the weights themselves", "git lfs pull")
            )
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else _HEADER_LIMIT + 1
        if length > min(_HEADER_LIMIT, size - 8):
            raise IntegrityError(Problem(f"{file} is not a whole safetensors file", f"{size} bytes"))
        text = stream.read(length)
    try:
        header = json.loads(text)
        entries = [
            _entry(file, name, value, 8 + length) for name, value in header.items() if name != "__metadata__"
        ]
    except DAMAGED_JSON as error:
        raise IntegrityError(Problem(f"{file} has an unreadable safetensors header", str(error))) from error
    needed = max((e.end for e in entries), default=8 + length)
    if needed != size:
        raise IntegrityError(
            Problem(f"{file} is damaged", f"{size} bytes", f"{needed} bytes, as its header says")
        )
    return entries


def _entry(file: Path, name: str, value: dict[str, Any], base: int) -> TensorEntry:
    start, end = (base + int(offset) for offset in value["data_offsets"])
    return TensorEntry(name, file, str(value["dtype"]), tuple(int(n) for n in value["shape"]), start, end)


def _weight_map(path: Path) -> dict[str, str] | None:
    """The index's tensor name -> file name; None where the single file or no index is there."""
    index = path / INDEX_NAME
    if (path / SINGLE_NAME).is_file() or not index.is_file():
        return None
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in weight_map.items()}
    except DAMAGED_JSON as error:
        raise IntegrityError(Problem(f"{index} is not an index of safetensors files", str(error))) from error


def _files_without_index(path: Path) -> list[Path]:
    single = path / SINGLE_NAME
    files = [single] if single.is_file() else sorted(path.glob("*.safetensors"))
    if not files:
        pickled = sorted(f.name for f in [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")])
        raise UserError(
            Problem(
                "the verifier's directory has no *.safetensors",
                f"{path} holds {', '.join(pickled[:3])}" if pickled else str(path),
                "weights in safetensors form; pickled weights are not read",
                "save them with save_pretrained(..., safe_serialization=True), then model.path=...",
            )
        )
    absent = [f.name for f in files if not f.is_file()]
    if absent:
        what = f"{len(absent)} of the weight files in {path} are links to nothing, or no files"
        raise _incomplete(what, absent)
    numbered = [m for f in files if (m := _SHARD_NUMBER.search(f.name))]
    totals = {int(m[2]) for m in numbered}
    if len(totals) == 1 and len(numbered) != (total := totals.pop()):
        there = {int(m[1]) for m in numbered}
        missing = [f"number {i}" for i in range(1, total + 1) if i not in there]
        raise _incomplete(f"{path} holds {len(numbered)} of {total} shards", missing or [files[-1].name])
    return files


def _incomplete(what: str, missing: list[str]) -> UserError:
    fix = "download the missing files, or point model.path at a complete copy"
    return UserError(Problem(what, ", ".join(missing[:3]), "the complete checkpoint", fix))


def _merged(files: list[Path]) -> dict[str, TensorEntry]:
    entries: dict[str, TensorEntry] = {}
    for file in files:
        for entry in read_header(file):
            if entry.name in entries:
                raise UserError(
                    Problem(
                        f"two files of {file.parent} hold {entry.name}",
                        f"{entries[entry.name].file.name}, {file.name}",
                        "one checkpoint per directory",
                    )
                )
            entries[entry.name] = entry
    return entries
