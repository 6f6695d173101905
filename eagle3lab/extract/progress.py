"""Progress of a capture: a bar on a terminal, one plain line per interval in a file."""

from __future__ import annotations

import time
from threading import Lock
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERVAL_SECONDS = 15.0


class CaptureProgress:
    """Counts captured tokens, or whatever `unit` says; shows them, their rate and what is left of the time."""

    def __init__(
        self,
        console: Console,
        total: int,
        *,
        what: str = "capture",
        unit: str = "tokens",
        interval_seconds: float = INTERVAL_SECONDS,
    ) -> None:
        self._console = console
        self._what, self._unit = what, unit
        self._rate_unit = "tok/s" if unit == "tokens" else f"{unit}/s"
        self._total = total
        self._interval = interval_seconds
        self._done = 0
        self._start = self._said = time.perf_counter()
        self._lock = Lock()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn(what),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} " + unit),
                TextColumn("{task.fields[rate]:,.0f} " + self._rate_unit),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task(what, total=total, rate=0.0)

    def __enter__(self) -> CaptureProgress:
        self._start = self._said = time.perf_counter()
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count what a batch finished, which may be nothing; from any thread."""
        with self._lock:
            self._advance(count)

    def _advance(self, count: int) -> None:
        self._done += count
        now = time.perf_counter()
        rate = self._done / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, advance=count, rate=rate)
        elif now - self._said >= self._interval:
            self._said = now
            left = f"{(self._total - self._done) / rate:,.0f} s left" if rate else "nothing is done yet"
            self._console.print(
                f"{self._what} {self._done:,}/{self._total:,} {self._unit}, {rate:,.0f} {self._rate_unit}, {left}",
                highlight=False,
            )


def say(console: Console, text: str) -> None:
    """Print as it is: no markup, no colours, no line breaks of its own."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
