"""A safetensors file written in one pass: its tensors come in pieces, and it is hashed as it goes to the disk.

The library's own writer wants whole tensors, joined before, and a checksum reads the file again: two more
passes over every byte. The bytes are those that the library writes.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from io import FileIO
from pathlib import Path

import torch
from torch import Tensor

# name of a dtype in the header; the order is that in which the library lays tensors of unlike dtypes out
_DTYPES = {
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
}
_ALIGNMENT = 8
_CHUNK_BYTES = 8 * 2**20  # at a time: every call hands Python's lock over twice
_FLUSH_BYTES = 16 * 2**20


def write_safetensors(
    path: Path, tensors: Mapping[str, Sequence[Tensor]], metadata: Mapping[str, str]
) -> str:
    """Write CPU tensors, each given as pieces along its first dimension; returns the sha256 of the file.

    The disk begins to write as soon as it can, so that the fsync that follows waits for little.
    Raises OSError, e.g. for a full disk, and ValueError for pieces that do not belong together.
    """
    order = sorted(tensors, key=lambda name: (_rank(tensors[name][0].dtype), name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name in order:
        first, *others = tensors[name]
        if any(piece.dtype != first.dtype or piece.shape[1:] != first.shape[1:] for piece in others):
            raise ValueError(f"{name} has pieces of several dtypes or widths")
        length = sum(len(piece) for piece in tensors[name])
        start, end = end, end + sum(piece.numel() * piece.element_size() for piece in tensors[name])
        header[name] = {
            "dtype": _DTYPES[first.dtype],
            "shape": [length, *first.shape[1:]],
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    with open(path, "wb", buffering=0) as file, ThreadPoolExecutor(1) as hasher:
        stream = _Stream(file, hasher)
        stream.write(memoryview(len(text).to_bytes(8, "little") + text))
        for name in order:
            for piece in tensors[name]:
                stream.write(_bytes_of(piece))
    return stream.digest.hexdigest()  # of every byte: the hasher has ended


class _Stream:
    """An open file, its checksum, and how much of it the disk was asked to take."""

    def __init__(self, file: FileIO, hasher: Executor) -> None:
        """`hasher`: one thread, which hashes while the next bytes are written."""
        self.file, self.hasher = file, hasher
        self.digest = hashlib.sha256()
        self.written = self.flushed = 0

    def write(self, data: memoryview) -> None:
        while data:
            count = self.file.write(data[:_CHUNK_BYTES])
            self.hasher.submit(self.digest.update, data[:count])
            data = data[count:]
            self.written += count
            if self.written - self.flushed >= _FLUSH_BYTES and hasattr(os, "posix_fadvise"):
                # of pages that are not on the disk yet this asks no more than to begin
                span = self.written - self.flushed
                os.posix_fadvise(self.file.fileno(), self.flushed, span, os.POSIX_FADV_DONTNEED)
                self.flushed = self.written


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def _rank(dtype: torch.dtype) -> int:
    return list(_DTYPES).index(dtype)
