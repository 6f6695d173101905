"""`metrics.csv`: every figure of a run, one row per logging interval and one per validation."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class CsvLog(Logger):
    """Appends rows to `path`, flushed at once. Columns are fixed; a figure that a row lacks is an empty cell.

    `keep_until`: rows of an earlier part of the run beyond this update are taken out, because the resumed run
    makes those updates again; 0 starts a new file.
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
            with self.path.open(newline="", encoding="utf-8") as f:
                rows = [row for row in csv.DictReader(f) if int(row["update"]) <= keep_until]
            self.columns = list(dict.fromkeys([*self.columns, *(name for row in rows for name in row)]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as f:
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
        with self.path.open("a", newline="", encoding="utf-8") as f:
            csv.DictWriter(f, self.columns, restval="").writerow(dict(metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved configuration lies in the run directory."""
