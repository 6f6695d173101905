"""What a run of the extraction did, for the terminal and for `<store>/logs/extract.json`."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.extract.alignment import SelfTestReport
from eagle3lab.store.files import write_text

LOG_FILE = "logs/extract.json"
MAX_NAMED = 20  # ids in a message; the log has all


@dataclass
class ExtractReport:
    """One run. Times are seconds of wall clock; they are no part of the store's identity."""

    store: Path
    num_rows: int
    num_tokens: int
    num_bytes: int  # of the hidden states
    num_captured_tokens: int = 0  # by this run
    num_captured_rows: int = 0
    seconds: dict[str, float] = field(default_factory=dict)  # rows, load, self_test, capture, write
    self_test: SelfTestReport | None = None  # None: nothing was left to capture
    lost: dict[str, str] = field(default_factory=dict)  # "file:line (row id)" -> why the engine failed twice

    @property
    def already_complete(self) -> bool:
        """Whether the whole store was there before."""
        return self.num_captured_rows == 0

    @property
    def tokens_per_second(self) -> float | None:
        """Captured tokens per second of capturing and writing."""
        seconds = self.seconds.get("capture", 0.0) + self.seconds.get("write", 0.0)
        return self.num_captured_tokens / seconds if seconds else None

    def describe(self) -> str:
        """For the end of the run."""
        size = (
            f"{self.num_rows:,} rows, {self.num_tokens:,} tokens, {self.num_bytes / 2**20:,.1f} MiB of states"
        )
        if self.already_complete:
            return f"store {self.store} is complete: {size}; nothing to capture"
        spent = self.seconds["capture"] + self.seconds["write"]
        return (
            f"store {self.store} is complete: {size}\n"
            f"captured {self.num_captured_tokens:,} tokens in {spent:,.1f} s "
            f"({self.tokens_per_second:,.0f} tok/s; {self.seconds['write'] / spent:.0%} of it waiting for the disk); rows {self.seconds['rows']:.1f} s, "
            f"load {self.seconds['load']:.1f} s, self-test {self.seconds['self_test']:.1f} s"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "num_rows": self.num_rows,
            "num_tokens": self.num_tokens,
            "num_captured_rows": self.num_captured_rows,
            "num_captured_tokens": self.num_captured_tokens,
            "num_bytes": self.num_bytes,
            "tokens_per_second": self.tokens_per_second,
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "self_test": self.self_test.to_json() if self.self_test else None,
            "lost": self.lost,
        }


def lost_rows_error(report: ExtractReport) -> UserError:
    """How a run ends that lost rows: their ids, the reasons by count, and what the next run does."""
    reasons = Counter(reason.partition(":")[0] for reason in report.lost.values())
    counts = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    ids = list(report.lost)
    more = f" and {len(ids) - MAX_NAMED:,} more" if len(ids) > MAX_NAMED else ""
    return UserError(
        Problem(
            f"{len(ids):,} of {report.num_rows:,} rows were lost, the engine failed on each of them twice "
            f"({counts}); {report.num_captured_rows:,} were captured by this run. Lost: "
            f"{', '.join(ids[:MAX_NAMED])}{more}",
            expected="the states of every row; the store is not complete",
            fix=f"the same command again: it tries the lost rows alone. Every id and reason is in "
            f"{report.store / LOG_FILE}",
        )
    )


def append_log(report: ExtractReport) -> None:
    """Add this run to the store's log; a log that cannot be read is replaced, it is only a log."""
    path = report.store / LOG_FILE
    path.parent.mkdir(exist_ok=True)
    try:
        runs = json.loads(path.read_text(encoding="utf-8"))["runs"]
    except (OSError, ValueError, KeyError, TypeError):
        runs = []
    write_text(path, json.dumps({"runs": [*runs, report.to_json()]}, indent=2) + "\n")
