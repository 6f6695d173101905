"""Records out of JSON Lines and JSON files, plain, gzip or xz."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.verifier.locate import asset_path

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

ASSET_PREFIX = "asset:"
SUFFIXES = (".jsonl", ".json")
COMPRESSED = (".xz", ".gz")
BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 100  # of nested lists and objects; Python's own limit would end the run


@dataclass(frozen=True)
class Record:
    """One record of a file, or the reason why it is none."""

    source: str  # "file:line"; in a JSON array: "file:number", counted from 1
    value: Any = None
    error: str | None = None


def resolve(spec: str) -> Path:
    """The file behind a path of the configuration; `asset:NAME` is shipped with eagle3lab."""
    if spec.startswith(ASSET_PREFIX):
        return asset_path(spec.removeprefix(ASSET_PREFIX))
    return Path(spec).expanduser()


def check_paths(specs: list[str]) -> list[Problem]:
    """Everything that is wrong with the list of files, without reading them."""
    key = "data.paths"
    if not specs:
        return [Problem(f"{key} names no file", fix=f"{key}=[conversations.jsonl]")]
    problems = []
    for spec in specs:
        suffixes = [s for s in Path(spec).suffixes if s not in COMPRESSED]
        if not suffixes or suffixes[-1] not in SUFFIXES:
            expected = "a name ending in .jsonl or .json, optionally .xz or .gz"
            problems.append(Problem(f"{key}: unknown kind of file", spec, expected))
        elif not resolve(spec).is_file():
            problems.append(Problem(f"{key}: no such file", spec, "an existing file", f"{key}=[PATH]"))
    return problems


def read_file(spec: str) -> Iterator[Record]:
    """Records of one file in order; a malformed one carries its error instead of a value.

    A file that begins with `[` is one JSON array, unless its first line is a whole list that others
    follow; any other is JSON Lines, cut at `\\n` only: U+2028, U+2029 and U+0085 are legal inside a JSON
    string. A byte order mark, CRLF and blank lines are accepted. Raises UserError when the file cannot be
    decompressed.
    """
    try:
        with _open(resolve(spec)) as stream:
            first, number = stream.readline().removeprefix(BOM), 1
            while first and not first.strip():
                first, number = stream.readline(), number + 1
            rest: IO[bytes] = stream
            if first.lstrip().startswith(b"["):
                rest = io.BytesIO(stream.read())
                if not (_is_whole(first) and rest.getvalue().strip()):
                    yield from _array(spec, first + rest.getvalue(), number)
                    return
            while first:
                if first.strip():
                    yield _line(f"{spec}:{number}", first)
                first, number = rest.readline(), number + 1
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UserError(
            Problem(f"cannot decompress {spec}", str(error), "a whole .xz or .gz file")
        ) from error


def _open(path: Path) -> IO[bytes]:
    if path.suffix == ".xz":
        return io.BufferedReader(_XzStreams(path))
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.open(path, "rb"))
    return path.open("rb")


class _XzStreams(io.RawIOBase):
    """All streams of a .xz file and the padding between them.

    `lzma.open` takes what follows the first stream for its end unless it is a stream: it loses the rest silently.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._stream: lzma.LZMADecompressor | None = lzma.LZMADecompressor(lzma.FORMAT_XZ)
        self._packed = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        view = memoryview(buffer).cast("B")
        while True:
            wants_more = self._stream is None or self._stream.needs_input
            if wants_more and not self._packed:
                self._packed = self._file.read(io.DEFAULT_BUFFER_SIZE)
                if not self._packed:
                    if self._stream is not None:
                        raise EOFError("the file ends inside a stream")
                    return 0
            if self._stream is None:
                self._packed = self._packed.lstrip(b"\0")
                if not self._packed:
                    continue
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            data = self._stream.decompress(self._packed, len(view))
            self._packed = self._stream.unused_data
            if self._stream.eof:
                self._stream = None
            if data:
                view[: len(data)] = data
                return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


def _line(source: str, line: bytes) -> Record:
    try:
        return Record(source, parse_json(line.decode("utf-8")))
    except ValueError as error:
        return Record(source, error=str(error))


def _is_whole(line: bytes) -> bool:
    """Whether a line that begins a list ends it too."""
    try:
        json.loads(line)
    except RecursionError:
        return True
    except ValueError:
        return False
    return True


def parse_json(text: str) -> Any:
    """Raises ValueError for what is no JSON text, and for what JSON readers take in different ways."""
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_deep(value):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {twice!r} stands twice in one object")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            child
            for node in level
            if isinstance(node, dict | list)
            for child in (node.values() if isinstance(node, dict) else node)
        ]
        if not level:
            return False
    return True


def _array(spec: str, data: bytes, first_line: int) -> Iterator[Record]:
    try:
        values = parse_json(data.decode("utf-8"))
    except ValueError as error:
        line = first_line - 1 + getattr(error, "lineno", 1)
        yield Record(f"{spec}:{line}", error=str(error))
        return
    for number, value in enumerate(values, 1):
        yield Record(f"{spec}:{number}", value)
