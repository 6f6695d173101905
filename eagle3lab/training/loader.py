"""Batches in plan order, and a loader that knows how long training waited for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from .run_plan import RunPlan


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
    """A `DataLoader` that adds up the seconds spent waiting for batches, in `wait_seconds`."""

    wait_seconds = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
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
