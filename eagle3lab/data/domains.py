"""Where rows come from: one domain for every data file, with a name that a metric can carry."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

MAX_DOMAINS = 20  # figures of more would bury the others
SUFFIXES = (".xz", ".gz", ".jsonl", ".json")


@dataclass(frozen=True)
class Domains:
    """Distinct `names`, made of letters, digits, `_` and `-`, and the place among them of every row."""

    names: tuple[str, ...]
    of_row: tuple[int, ...]

    @classmethod
    def of(cls, sources: Sequence[str]) -> Domains:
        """Group rows by the file in their source: `file:line`, or `directory/file` where a file is one row."""
        files = [_file_of(source) for source in sources]
        distinct = sorted(set(files))
        number = {file: i for i, file in enumerate(distinct)}
        return cls(tuple(_names(distinct)), tuple(number[file] for file in files))

    @property
    def told_apart(self) -> bool:
        """Whether figures by domain say more than those over all rows, and are few enough to be read."""
        return 1 < len(self.names) <= MAX_DOMAINS

    def num_rows(self) -> list[int]:
        """Rows of every domain."""
        return [self.of_row.count(i) for i in range(len(self.names))]


def _file_of(source: str) -> str:
    file, _, line = source.rpartition(":")
    return file if line.isdigit() and file else PurePath(source).parent.as_posix()


def _names(files: Sequence[str]) -> list[str]:
    """The shortest ends of the paths that tell all of them apart; numbered where characters that go do not."""
    parts = [_parts(file) for file in files]
    depth = next(
        (d for d in range(1, max(map(len, parts), default=1)) if len({p[-d:] for p in parts}) == len(parts)),
        max(map(len, parts), default=1),
    )
    names = [re.sub(r"[^A-Za-z0-9_-]+", "_", "_".join(p[-depth:])).strip("_") or "rows" for p in parts]
    taken: set[str] = set()
    for i, name in enumerate(names):
        number = 1
        while names[i] in taken:
            number += 1
            names[i] = f"{name}_{number}"
        taken.add(names[i])
    return names


def _parts(file: str) -> tuple[str, ...]:
    path = PurePath(file.removeprefix("asset:"))
    name = path.name
    for suffix in SUFFIXES:
        name = name.removesuffix(suffix)
    return (*(p for p in path.parent.parts if p != "/"), name)
