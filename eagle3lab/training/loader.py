"""Batches in plan order, and a loader that knows how long training waited for it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from eagle3lab.config.flops import StepWork
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.raw import StateCheck, dequantize_batch
from eagle3lab.data.shift import LAST_KEPT, SCALES, STATES, Batch

from .run_plan import RunPlan

# read on the host: on the device they would make every step wait for it
HOST_KEYS = ("row_index", "lengths")
HOST_PREFIX = "host_"  # of whatever else stays beside the batch
DOMAIN = "host_domain"  # of a validation pack, whose rows are all of one
_WORK, _BYTES = "host_work", "host_bytes"  # never leave the loader
PACKS_READY = 1  # read and waiting, beside one per thread; a pack of 8192 at hidden 4096 takes 268 MB


def stays_on_host(key: str) -> bool:
    """Whether an entry of a batch is for the host alone."""
    return key in HOST_KEYS or key.startswith(HOST_PREFIX)


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
    CUDA the next pack travels on a stream of its own while the current one is computed. Only on the device are
    states looked at (`finish_check` asks it) and fp8 ones raised to bf16; nothing waits for it in between.

    prepare: computes further entries from a packed batch, in the reading threads and on the host. What has a
    `to` (tensors, and objects that also offer `pin_memory` and `record_stream`) travels with the batch, except
    what `stays_on_host` names. count_work: counts the work of a packed batch, there too.
    `wait_seconds` adds up what training waited for packs; `bytes_read` and `work` what the `packs` handed
    out so far held.
    """

    def __init__(
        self,
        data: Eagle3SampleFileDataset,
        batches: Batches,
        collate: Callable[[Sequence[Batch]], Batch],
        *,
        num_threads: int,
        device: torch.device,
        prepare: Callable[[Batch], dict[str, Any]] | None = None,
        count_work: Callable[[Batch], StepWork] | None = None,
    ) -> None:
        self.data = data
        self.batches = batches
        self.collate = collate
        self.num_threads = num_threads
        self.device = device
        self.prepare = prepare
        self.count_work = count_work
        self.check = StateCheck(data.check_row)
        self.wait_seconds = 0.0
        self.packs = 0
        self.bytes_read = 0
        self.work: StepWork | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Batch]:
        packs = self._read_ahead() if self.num_threads else map(self._pack, self.batches)
        timed = self._timed(packs)
        for batch in self._on_device(timed) if self.device.type == "cuda" else timed:
            self._count(batch)
            arrived = [dequantize_batch(batch)]
            del batch  # what is kept here takes device memory while the step runs
            self.check.add(arrived[0])
            yield arrived.pop()

    def finish_check(self) -> None:
        """Raise IntegrityError for a damaged row among the packs handed out since the last call."""
        self.check.finish()

    def _pack(self, rows: Sequence[int]) -> Batch:
        batch = self.collate([self.data[row] for row in rows])
        batch[_BYTES] = state_bytes(batch)
        if self.count_work is not None:
            batch[_WORK] = self.count_work(batch)
        if self.prepare is not None:
            further = self.prepare(batch)
            if self.device.type == "cuda":
                further = {k: v.pin_memory() if _travels(k, v) else v for k, v in further.items()}
            batch |= further
        return batch

    def _count(self, batch: Batch) -> None:
        self.packs += 1
        self.bytes_read += batch.pop(_BYTES)
        work = batch.pop(_WORK, None)
        if work is not None:
            self.work = work if self.work is None else self.work + work

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
        sent: deque[Batch] = deque()  # the next one, and while it is sent no other
        for batch in packs:
            with torch.cuda.stream(side):
                sent.append(
                    {
                        k: v.to(self.device, non_blocking=True) if _travels(k, v) else v
                        for k, v in batch.items()
                    }
                )
            if len(sent) > 1:
                yield self._hand_over(sent.popleft(), side)
        while sent:
            yield self._hand_over(sent.popleft(), side)

    def _hand_over(self, batch: Batch, side: torch.cuda.Stream) -> Batch:
        current = torch.cuda.current_stream(self.device)
        current.wait_stream(side)
        for key, value in batch.items():
            if _travels(key, value):
                value.record_stream(current)  # its memory must outlive the work queued on this stream
        return batch


def state_bytes(batch: Batch) -> int:
    """Bytes of a pack's states and scales as they lie in the store: without padding and what is left out."""
    num_tokens = int(batch["lengths"].sum())
    kept = int(batch[LAST_KEPT].sum()) if LAST_KEPT in batch else num_tokens
    return sum(
        batch[key][0, 0].nbytes * count
        for name, count in zip(STATES, (num_tokens, kept), strict=True)
        for key in (name, name + SCALES)
        if key in batch
    )


def _travels(key: str, value: Any) -> bool:
    return hasattr(value, "to") and not stays_on_host(key)
