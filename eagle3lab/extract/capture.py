"""Shards of rows -> engine -> store. A row on which the engine fails is asked for again by itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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

    Raises EngineDied when the engine is gone; what was captured until then is kept.
    """
    lost_shards = 0
    for number, shard in list(writer.pending()):
        captured = load_partial(writer.path, number, shard)
        before = len(captured)
        reasons: dict[int, str] = {}
        try:
            for batch in _batches(engine, shard, captured, batch_tokens):
                with timed(report.seconds, "capture"):
                    answers = _ask(engine, [shard[i].input_ids for i in batch], layer_ids)
                for i, answer in zip(batch, answers, strict=True):
                    if isinstance(answer, str):
                        reasons[i] = answer
                    else:
                        aux, last = answer.aux.to(store_dtype), answer.last.to(store_dtype)
                        captured[i] = (aux, last, answer.token_ids)
                progress.advance(sum(len(shard[i].input_ids) for i in batch))
        except EngineDied:
            _keep(writer, number, shard, captured)
            raise
        report.num_captured_rows += len(captured) - before
        report.num_captured_tokens += sum(len(ids) for _, _, ids in list(captured.values())[before:])
        if reasons:
            report.lost |= {f"{shard[i].source} ({shard[i].row_id[:12]})": r for i, r in reasons.items()}
            _keep(writer, number, shard, captured)
            lost_shards = 0 if len(captured) > before else lost_shards + 1
            if lost_shards == MAX_LOST_SHARDS:
                return
            continue
        lost_shards = 0
        with timed(report.seconds, "write"):
            writer.write_shard(number, [(row, *captured[i]) for i, row in enumerate(shard)])
        drop_partial(writer.path, number)


def _batches(
    engine: Engine, shard: Sequence[Row], done: dict[int, Captured], batch_tokens: int
) -> list[list[int]]:
    """Positions of the rows that are still to be captured, together as the engine likes them."""
    left = [i for i in range(len(shard)) if i not in done]
    if not engine.pads:
        return [left] if left else []
    planned = plan_batches([len(shard[i].input_ids) for i in left], batch_tokens)
    return [[left[j] for j in batch] for batch in planned]


def _ask(engine: Engine, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States | str]:
    """States, or the reason why there are none, of every row.

    A row is lost when it fails twice by itself: the failure of a whole batch says nothing about one row.
    """
    answers = _try(engine, rows, layer_ids)
    tries_left = 1 if len(rows) == 1 else 2
    for i in range(len(rows)):
        for _ in range(tries_left):
            if isinstance(answers[i], str):
                answers[i] = _try(engine, [rows[i]], layer_ids)[0]
    return answers


def _try(engine: Engine, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States | str]:
    try:
        answers = engine.capture(rows, layer_ids)
    except EngineDied:
        raise
    except ENGINE_ERRORS as error:
        return [f"{type(error).__name__}: {error}"] * len(rows)
    if len(answers) != len(rows):  # which of them is missing cannot be told
        return [f"empty result: {len(answers)} answers for {len(rows)} rows"] * len(rows)
    return ["empty result" if answer is None else answer for answer in answers]


def _keep(writer: StoreWriter[Row], number: int, shard: Sequence[Row], captured: dict[int, Captured]) -> None:
    save_partial(writer.path, number, {shard[i].row_id: states for i, states in captured.items()})


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Add the wall clock of the block to `seconds[name]`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start
