"""Time spent training, without validation and saving, and the memory it took."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_IMPORTED = time.perf_counter()


class TrainClock:
    """Seconds of training since `restart`. Pauses may be nested."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._paused = 0.0
        self._pause_began: float | None = None

    def paused_seconds(self) -> float:
        """Of the pauses that have ended."""
        return self._paused

    def seconds(self) -> float:
        now = time.perf_counter() if self._pause_began is None else self._pause_began
        return now - self._started - self._paused

    @contextmanager
    def pause(self) -> Iterator[None]:
        outer = self._pause_began is None
        self.stop()
        try:
            yield
        finally:
            if outer:
                self.go_on()

    def stop(self) -> None:
        if self._pause_began is None:
            self._pause_began = time.perf_counter()

    def go_on(self) -> None:
        if self._pause_began is not None:
            self._paused += time.perf_counter() - self._pause_began
            self._pause_began = None


def process_seconds() -> float:
    """Seconds since this process was started; where the system does not tell, since this room was imported."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return time.perf_counter() - _IMPORTED


def wait_for_device(device: torch.device) -> None:
    """Return when the work queued so far is done; CPU work is never queued."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def peak_memory_gib(device: torch.device) -> float:
    """GiB: the most that tensors took on a CUDA device; elsewhere the process's largest resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
