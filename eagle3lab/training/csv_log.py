"""`metrics.csv`: every figure of a run, one row per logging interval and one per validation."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.store.files import disk_errors

_ROOM = ("room for a few lines more", "free space, then the same command with resume=true")


class CsvLog(Logger):
    """Appends rows to `path`, flushed at once. Columns are fixed; a figure that a row lacks is an empty cell.

    `keep_until`: rows of an earlier part of the run beyond this update are taken out, because the resumed run
    makes those updates again, and so is a last line that was cut; 0 starts a new file.
    Raises `IntegrityError` for a file with other damage, `UserError` when the disk is full.
    """

    def __init__(self, path: Path, columns: Sequence[str], *, keep_until: int = 0) -> None:
        super().__init__()
        self.path = path
        self.columns = list(columns)
        self._begin(keep_until)

    @rank_zero_only
    def _begin(self, keep_until: int) -> None:
        rows: list[dict[str, str]] = []
        if keep_until and self.path.is_file():
            rows = [row for row in _whole_rows(self.path) if int(row["update"]) <= keep_until]
            self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with disk_errors(self.path, *_ROOM), temporary.open("w", newline="", encoding="utf-8") as f:
            writer = csv.DictWriter(f, self.columns, restval="")
            writer.writeheader()
            writer.writerows(rows)
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, self.path)

    @property
    def name(self) -> str:
        return "csv"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append one row. Raises `ValueError` for a figure without a column."""
        with disk_errors(self.path, *_ROOM), self.path.open("a", newline="", encoding="utf-8") as f:
            csv.DictWriter(f, self.columns, restval="").writerow(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved configuration lies in the run directory."""


def _whole_rows(path: Path) -> list[dict[str, str]]:
    """All rows but a last one without its end: a full disk or a kill came in between."""
    lines = path.read_bytes().splitlines(keepends=True)
    whole = b"".join(lines[:-1] if lines and not lines[-1].endswith(b"\n") else lines)
    rows = list(csv.DictReader(io.StringIO(whole.decode(errors="replace"), newline="")))
    for number, row in enumerate(rows, start=2):
        if None in row or None in row.values() or not (row.get("update") or "").isdecimal():
            raise IntegrityError(
                Problem(
                    f"line {number} of {path} is damaged",
                    next(iter(row.values()), None),
                    "a row as it was logged",
                    "take the line, or the file, away: the checkpoints hold without it",
                )
            )
    return rows
