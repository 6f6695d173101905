"""Shards of rows -> engine -> store. A row on which the engine fails is asked for again by itself.

While the engine works on one request, the states of those before it are read, checked, hashed and written by
other threads: a store should cost what its forward passes cost.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import torch

from eagle3lab.engines.base import Engine, EngineDied, States
from eagle3lab.extract.batches import plan_batches
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.extract.report import ExtractReport
from eagle3lab.rows.rows import Row
from eagle3lab.store.partial import Captured, drop_partial, load_partial, save_partial
from eagle3lab.store.writer import StoreWriter

# what a backend raises when it cannot answer: its own errors, a full device, a broken pipe, a time-out
ENGINE_ERRORS = (RuntimeError, OSError)
MAX_LOST_SHARDS = 3  # one after the other without one answer: the engine is broken, not the rows
# of states in one request to an engine that schedules by itself, unless a shard has more
REQUEST_BYTES = 2**29
MEMORY_SHARE = 1 / 4  # of the machine's memory, for the states that are asked for or wait to be written
WRITE_THREADS = 4
T = TypeVar("T")  # what an engine is asked
A = TypeVar("A")  # what it answers


@dataclass
class ShardStates:
    """What is known of one shard's rows, by their position in it."""

    number: int
    rows: Sequence[Row]
    captured: dict[int, Captured]
    reasons: dict[int, str] = field(default_factory=dict)  # of rows that are lost
    num_before: int = 0  # rows that an earlier run captured


def capture_shards(
    engine: Engine,
    writer: StoreWriter[Row],
    layer_ids: Sequence[int],
    *,
    batch_tokens: int,
    store_dtype: torch.dtype,
    report: ExtractReport,
    progress: CaptureProgress,
) -> None:
    """Capture and write every pending shard; what was lost is in `report.lost`, and its shard not written.

    `report.seconds` gets "capture", waiting for the engine, and "write", waiting for the disk. As many tokens
    as the engine is asked for at a time may be waiting to be written.

    Raises EngineDied when the engine is gone; what was captured until then is kept.
    """

    def capture(request: list[tuple[int, list[Row]]]) -> list[ShardStates]:
        return _capture(engine, writer, request, layer_ids, batch_tokens, store_dtype, progress)

    pending = list(writer.pending())
    request_tokens, at_once = _sizes(engine, writer, pending, store_dtype)
    requests = _requests(pending, 0 if engine.pads else request_tokens)
    asked: deque[Future[list[ShardStates]]] = deque()
    writing: deque[tuple[int, Future[None]]] = deque()  # with the tokens of each
    lost_shards = 0
    with _cheap_threads(engine), _threads(at_once) as captures, _threads(WRITE_THREADS) as writes:
        asked.extend(captures.submit(capture, request) for request in islice(requests, at_once))
        while asked:  # also after the last request of a broken engine: what it is asked already counts
            with timed(report.seconds, "capture"):
                shards = asked.popleft().result()
            with timed(report.seconds, "write"):
                _wait(writing, leave=at_once * request_tokens)
            if lost_shards < MAX_LOST_SHARDS:
                asked.extend(captures.submit(capture, request) for request in islice(requests, 1))
            for shard in shards:
                _count(report, shard)
                if not shard.reasons:
                    lost_shards = 0
                    writing.append((_num_tokens(shard.rows), writes.submit(_write, writer, shard)))
                    continue
                _keep(writer, shard)
                lost_shards = 0 if len(shard.captured) > shard.num_before else lost_shards + 1
        with timed(report.seconds, "write"):
            _wait(writing)


def _sizes(
    engine: Engine,
    writer: StoreWriter[Row],
    pending: Sequence[tuple[int, list[Row]]],
    store_dtype: torch.dtype,
) -> tuple[int, int]:
    """Tokens of one request, and how many requests the engine is asked at a time.

    An engine that is given batches gets one shard at a time; one that schedules by itself gets many, as far
    as their states find room in memory, twice: on their way out of the engine and into the store.
    """
    largest_shard = max((_num_tokens(rows) for _, rows in pending), default=1)
    if engine.pads:
        return largest_shard, engine.concurrency
    manifest = writer.manifest
    bytes_per_token = (len(manifest.layer_ids) + 1) * manifest.verifier.hidden_size * store_dtype.itemsize
    request_tokens = max(largest_shard, REQUEST_BYTES // bytes_per_token)
    room = int(_memory_bytes() * MEMORY_SHARE) // (2 * request_tokens * bytes_per_token)
    return request_tokens, max(2, min(engine.concurrency, room))


def _requests(
    pending: Sequence[tuple[int, list[Row]]], request_tokens: int
) -> Iterator[list[tuple[int, list[Row]]]]:
    """The pending shards, by number, in the groups in which the engine is asked for them."""
    request: list[tuple[int, list[Row]]] = []
    filled = 0
    for number, rows in pending:
        num_tokens = _num_tokens(rows)
        if request and filled + num_tokens > request_tokens:
            yield request
            request, filled = [], 0
        request.append((number, rows))
        filled += num_tokens
    if request:
        yield request


def _num_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.input_ids) for row in rows)


def _memory_bytes() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _capture(
    engine: Engine,
    writer: StoreWriter[Row],
    request: Sequence[tuple[int, list[Row]]],
    layer_ids: Sequence[int],
    batch_tokens: int,
    store_dtype: torch.dtype,
    progress: CaptureProgress,
) -> list[ShardStates]:
    """One request: the states of every row of some shards, or why there are none."""
    shards = [ShardStates(number, rows, load_partial(writer.path, number, rows)) for number, rows in request]
    for shard in shards:
        shard.num_before = len(shard.captured)
    wanted = [(shard, i) for shard in shards for i in range(len(shard.rows)) if i not in shard.captured]
    rows = [shard.rows[i].input_ids for shard, i in wanted]
    try:
        for batch in _batches(engine, [len(row) for row in rows], batch_tokens):
            answers = _ask(engine, [rows[j] for j in batch], layer_ids)
            for j, answer in zip(batch, answers, strict=True):
                shard, i = wanted[j]
                if isinstance(answer, str):
                    shard.reasons[i] = answer
                else:
                    shard.captured[i] = (
                        answer.aux.to(store_dtype),
                        answer.last.to(store_dtype),
                        answer.token_ids,
                    )
            progress.advance(sum(len(rows[j]) for j in batch))
    except EngineDied:
        for shard in shards:
            _keep(writer, shard)
        raise
    return shards


def _batches(engine: Engine, lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions of the rows that are asked for together, as the engine likes them."""
    if not engine.pads:
        return [list(range(len(lengths)))] if lengths else []
    return plan_batches(lengths, batch_tokens)


def _ask(engine: Engine, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States | str]:
    return ask_each(
        rows,
        lambda some: engine.capture(some, layer_ids),
        lambda states, _: "empty result" if states is None else states,
        unit="rows",
    )


def ask_each(
    items: Sequence[T],
    ask: Callable[[Sequence[T]], Sequence[A]],
    judge: Callable[[A, T], A | str],
    *,
    unit: str,
) -> list[A | str]:
    """What `judge` makes of the engine's answer to every item, or the reason why there is none.

    An item is lost when it fails twice by itself: the failure of a whole batch says nothing about one item.
    """

    def attempt(some: Sequence[T]) -> list[A | str]:
        try:
            answers = ask(some)
        except EngineDied:
            raise
        except ENGINE_ERRORS as error:
            return [f"{type(error).__name__}: {error}"] * len(some)
        if len(answers) != len(some):  # which of them is missing cannot be told
            return [f"empty result: {len(answers)} answers for {len(some)} {unit}"] * len(some)
        return [judge(answer, item) for answer, item in zip(answers, some, strict=True)]

    answers = attempt(items)
    tries_left = 1 if len(items) == 1 else 2
    for i, item in enumerate(items):
        for _ in range(tries_left):
            if isinstance(answers[i], str):
                answers[i] = attempt([item])[0]
    return answers


def _count(report: ExtractReport, shard: ShardStates) -> None:
    new = list(shard.captured.values())[shard.num_before :]
    report.num_captured_rows += len(new)
    report.num_captured_tokens += sum(len(token_ids) for _, _, token_ids in new)
    for i, reason in shard.reasons.items():
        row = shard.rows[i]
        report.lost[f"{row.source} ({row.row_id[:12]})"] = reason


def _write(writer: StoreWriter[Row], shard: ShardStates) -> None:
    writer.write_shard(shard.number, [(row, *shard.captured.pop(i)) for i, row in enumerate(shard.rows)])
    drop_partial(writer.path, shard.number)


def _keep(writer: StoreWriter[Row], shard: ShardStates) -> None:
    rows = {shard.rows[i].row_id: states for i, states in shard.captured.items()}
    save_partial(writer.path, shard.number, rows)


def _wait(writing: deque[tuple[int, Future[None]]], leave: int = 0) -> None:
    """Wait until the shards that are being written have no more than `leave` tokens; raises the first error."""
    while writing and (sum(num_tokens for num_tokens, _ in writing) > leave or writing[0][1].done()):
        writing.popleft()[1].result()


@contextmanager
def _cheap_threads(engine: Engine) -> Iterator[None]:
    """One processor thread per torch operation where the engine computes elsewhere: the operations of the
    readers and writers are small, and there are many of them at a time."""
    before = torch.get_num_threads()
    if not engine.pads:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that finish what they have begun and drop the rest when the block fails."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall clock of the block to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
