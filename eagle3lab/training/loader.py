"""Batches in plan order, and a loader that knows how long training waited for it."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from .run_plan import RunPlan

# read on the host: on the device they would make every step wait for it
HOST_KEYS = ("row_index", "lengths")


class PlannedBatches:
    """A batch sampler that yields one rank's packs of the whole run, from a given update on.

    All epochs are one stream: there is no gap at an epoch's end, and resuming is starting later.
    """

    def __init__(self, plan: RunPlan, rank: int, start: int = 0) -> None:
        self.plan = plan
        self.rank = rank
        self.start = start

    def __iter__(self) -> Iterator[list[int]]:
        return self.plan.packs_of_rank(self.rank, self.start)

    def __len__(self) -> int:
        return self.plan.num_packs_of_rank(self.start)


class TimedLoader(DataLoader[dict[str, Any]]):
    """A `DataLoader` that adds up the seconds spent waiting for batches, in `wait_seconds`.

    With a CUDA `device` it hands out batches that are there already: the next one is copied on a stream of
    its own while the current one is computed. Entries in `host_keys` stay on the host.
    """

    def __init__(
        self, *args: Any, device: torch.device, host_keys: Collection[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.device = device
        self.host_keys = frozenset(host_keys)
        self.wait_seconds = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self._on_device(self._timed()) if self.device.type == "cuda" else self._timed()

    def _timed(self) -> Iterator[dict[str, Any]]:
        started = time.perf_counter()
        batches = super().__iter__()
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            self.wait_seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def _on_device(self, batches: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        side = torch.cuda.Stream(self.device)
        ready: dict[str, Any] | None = None
        for batch in batches:
            with torch.cuda.stream(side):
                coming = {
                    key: value if key in self.host_keys else value.to(self.device, non_blocking=True)
                    for key, value in batch.items()
                }
            if ready is not None:
                yield self._hand_over(ready, side)
            ready = coming
        if ready is not None:
            yield self._hand_over(ready, side)

    def _hand_over(self, batch: dict[str, Any], side: torch.cuda.Stream) -> dict[str, Any]:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(side)
        for key, value in batch.items():
            if key not in self.host_keys:
                value.record_stream(current)  # its memory must outlive the work queued on this stream
        return batch
