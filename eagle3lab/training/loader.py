"""Batches in plan order, and a loader that knows how long training waited for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch.utils.data import Dataset

from eagle3lab.data.shift import Batch

from .run_plan import RunPlan

# read on the host: on the device they would make every step wait for it
HOST_KEYS = ("row_index", "lengths")
PACKS_READY = 1  # read and waiting, beside one per thread; a pack of 8192 at hidden 4096 takes 268 MB


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


class Batches(Protocol):
    """Row indices of one pack after the other, and how many packs there are."""

    def __iter__(self) -> Iterator[list[int]]: ...
    def __len__(self) -> int: ...


class PackLoader:
    """Reads packs ahead with threads, and hands them out in order on the training device.

    Threads instead of worker processes: the states lie in mapped files, reading them releases the
    interpreter lock, and a pack is copied once, into pinned memory, with nothing sent between processes. On
    CUDA the next pack travels on a stream of its own while the current one is computed; entries in
    `HOST_KEYS` stay on the host. `wait_seconds` adds up what training waited for packs.
    """

    def __init__(
        self,
        data: Dataset[Batch],
        batches: Batches,
        collate: Callable[[Sequence[Batch]], Batch],
        *,
        num_threads: int,
        device: torch.device,
    ) -> None:
        self.data = data
        self.batches = batches
        self.collate = collate
        self.num_threads = num_threads
        self.device = device
        self.wait_seconds = 0.0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        packs = self._read_ahead() if self.num_threads else map(self._pack, self.batches)
        timed = self._timed(packs)
        return self._on_device(timed) if self.device.type == "cuda" else timed

    def _pack(self, rows: Sequence[int]) -> Batch:
        return self.collate([self.data[row] for row in rows])

    def _read_ahead(self) -> Iterator[Batch]:
        # one computing thread each: the readers must not take the training thread's cores
        pool = ThreadPoolExecutor(self.num_threads, "pack", initializer=torch.set_num_threads, initargs=(1,))
        coming: deque[Future[Batch]] = deque()
        try:
            for rows in self.batches:
                coming.append(pool.submit(self._pack, rows))
                if len(coming) > self.num_threads + PACKS_READY:
                    yield coming.popleft().result()
            while coming:
                yield coming.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)

    def _timed(self, packs: Iterable[Batch]) -> Iterator[Batch]:
        started = time.perf_counter()
        for batch in packs:
            self.wait_seconds += time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    def _on_device(self, packs: Iterator[Batch]) -> Iterator[Batch]:
        side = torch.cuda.Stream(self.device)
        ready: Batch | None = None
        for batch in packs:
            with torch.cuda.stream(side):
                coming = {
                    key: value if key in HOST_KEYS else value.to(self.device, non_blocking=True)
                    for key, value in batch.items()
                }
            if ready is not None:
                yield self._hand_over(ready, side)
            ready = coming
        if ready is not None:
            yield self._hand_over(ready, side)

    def _hand_over(self, batch: Batch, side: torch.cuda.Stream) -> Batch:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(side)
        for key, value in batch.items():
            if key not in HOST_KEYS:
                value.record_stream(current)  # its memory must outlive the work queued on this stream
        return batch
