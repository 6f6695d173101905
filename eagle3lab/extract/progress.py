"""Progress of a capture: a bar on a terminal, one plain line per interval in a file."""

from __future__ import annotations

import time
from threading import Lock
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

INTERVAL_SECONDS = 15.0


class CaptureProgress:
    """Counts captured tokens; shows tokens, tokens per second and what is left of the time."""

    def __init__(
        self, console: Console, total_tokens: int, *, interval_seconds: float = INTERVAL_SECONDS
    ) -> None:
        self._console = console
        self._total = total_tokens
        self._interval = interval_seconds
        self._done = 0
        self._start = self._said = time.perf_counter()
        self._lock = Lock()
        self._bar: Progress | None = None
        if console.is_terminal:
            self._bar = Progress(
                TextColumn("capture"),
                BarColumn(),
                TextColumn("{task.completed:,.0f}/{task.total:,.0f} tokens"),
                TextColumn("{task.fields[rate]:,.0f} tok/s"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=console,
            )
            self._task = self._bar.add_task("capture", total=total_tokens, rate=0.0)

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

    def advance(self, num_tokens: int) -> None:
        """Count a finished batch; from any thread."""
        with self._lock:
            self._advance(num_tokens)

    def _advance(self, num_tokens: int) -> None:
        self._done += num_tokens
        now = time.perf_counter()
        rate = self._done / max(now - self._start, 1e-9)
        if self._bar is not None:
            self._bar.update(self._task, advance=num_tokens, rate=rate)
        elif now - self._said >= self._interval:
            self._said = now
            left = (self._total - self._done) / rate
            self._console.print(
                f"capture {self._done:,}/{self._total:,} tokens, {rate:,.0f} tok/s, {left:,.0f} s left",
                highlight=False,
            )
