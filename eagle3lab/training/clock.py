"""Time spent training, without validation and saving, and the memory it took."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class TrainClock:
    """Seconds of training since `restart`. Pauses may be nested."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._started = time.perf_counter()
        self._paused = 0.0
        self._pause_began: float | None = None

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


def peak_memory_gib(device: torch.device) -> float:
    """GiB: the most that tensors took on a CUDA device; elsewhere the process's largest resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
