"""Reading a GGUF file: its metadata and its tensors, dequantised to fp32.

Layout: the GGUF specification of ggml (version 2 and 3). Only the tensor types that the embedded
verifier's file uses are read; another one is an error, not a guess.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lab.config.errors import IntegrityError, Problem

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_BLOCK = 32  # values that share one scale in every quantised type below
_Q8_0 = np.dtype([("scale", "<f2"), ("q", "i1", _BLOCK)])
_Q4_1 = np.dtype([("scale", "<f2"), ("minimum", "<f2"), ("q", "u1", _BLOCK // 2)])
_F32, _F16, _Q4_1_ID, _Q8_0_ID = 0, 1, 3, 8


@dataclass(frozen=True)
class GgufTensor:
    shape: tuple[int, ...]  # row major, slowest dimension first
    kind: int
    start: int  # byte offset in the file


@dataclass(frozen=True)
class Gguf:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]
    data: mmap  # the whole file, mapped and not read


def open_gguf(path: Path) -> Gguf:
    """Parse metadata and the tensor table; tensors stay mapped. Raises `IntegrityError` for another file."""
    try:
        with path.open("rb") as stream:
            data = mmap(stream.fileno(), 0, access=ACCESS_READ)
    except ValueError as error:
        raise IntegrityError(Problem(f"{path} is empty")) from error
    cursor = _Cursor(data)
    try:
        magic, version = data[:4], struct.unpack_from("<I", data, 4)[0]
        if magic != b"GGUF" or version not in (2, 3):
            raise IntegrityError(Problem(f"{path} is not a GGUF file of version 2 or 3", magic))
        cursor.position = 8
        num_tensors, num_keys = cursor.scalar("<Q"), cursor.scalar("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("<I"))
        table = [cursor.tensor() for _ in range(num_tensors)]
    except (struct.error, UnicodeDecodeError, KeyError) as error:
        raise IntegrityError(Problem(f"{path} has an unreadable GGUF header", str(error))) from error
    alignment = metadata.get("general.alignment", 32)
    base = -(-cursor.position // alignment) * alignment
    tensors = {name: GgufTensor(shape, kind, base + offset) for name, shape, kind, offset in table}
    return Gguf(path, metadata, tensors, data)


def read_tensor(file: Gguf, name: str) -> np.ndarray:
    """Tensor `name` as fp32 in its own shape. Formulas: ggml's dequantize_row_q4_1 and _q8_0."""
    tensor = file.tensors[name]
    count = prod(tensor.shape)
    try:
        if tensor.kind in (_F32, _F16):
            dtype = "<f4" if tensor.kind == _F32 else "<f2"
            values = np.frombuffer(file.data, dtype, count, tensor.start).astype(np.float32)
        elif tensor.kind == _Q8_0_ID:
            blocks = np.frombuffer(file.data, _Q8_0, count // _BLOCK, tensor.start)
            values = blocks["scale"].astype(np.float32)[:, None] * blocks["q"].astype(np.float32)
        elif tensor.kind == _Q4_1_ID:
            blocks = np.frombuffer(file.data, _Q4_1, count // _BLOCK, tensor.start)
            # Low nibbles are a block's first 16 values, high nibbles its last 16.
            levels = np.concatenate([blocks["q"] & 15, blocks["q"] >> 4], axis=1).astype(np.float32)
            values = blocks["scale"].astype(np.float32)[:, None] * levels
            values += blocks["minimum"].astype(np.float32)[:, None]
        else:
            known = "0 (F32), 1 (F16), 3 (Q4_1) or 8 (Q8_0)"
            raise IntegrityError(Problem(f"{name} of {file.path} has ggml type", tensor.kind, known))
        return values.reshape(tensor.shape)
    except ValueError as error:
        raise IntegrityError(Problem(f"{file.path} is cut short inside {name}", str(error))) from error


class _Cursor:
    """A position in the file's bytes and the readers that move it."""

    def __init__(self, data: mmap) -> None:
        self.data, self.position = data, 0

    def scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return value

    def string(self) -> str:
        length = self.scalar("<Q")
        text = self.data[self.position : self.position + length]
        if len(text) != length:
            raise struct.error("a string runs over the end of the file")
        self.position += length
        return text.decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            item, count = self.scalar("<I"), self.scalar("<Q")
            return [self.value(item) for _ in range(count)]
        return self.scalar(_SCALARS[kind])

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, num_dims = self.string(), self.scalar("<I")
        dims = [self.scalar("<Q") for _ in range(num_dims)]  # fastest dimension first
        return name, tuple(reversed(dims)), self.scalar("<I"), self.scalar("<Q")
