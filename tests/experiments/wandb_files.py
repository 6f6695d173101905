"""Offline W&B runs read back from their files, so that tests see what `wandb sync` would send.

W&B's Python package holds the records' format (protobuf) and no reader of the file around them: blocks of 32 KiB as
in a LevelDB log, each piece of a record with its checksum, length and kind.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MAGIC, BLOCK, PIECE = b":W&B", 32768, struct.Struct("<IHB")
PATIENCE_SECONDS = 20
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """The records of one `offline-run-*` folder."""

    folder: Path
    run_id: str = ""
    group: str = ""
    job_type: str = ""
    tags: tuple[str, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, str] = field(default_factory=dict)  # pattern of figures -> their x-axis
    exit_code: int | None = None  # None: it never ended


def read_runs(directory: Path) -> list[OfflineRun]:
    """Every offline run below `directory`, by folder. W&B's process writes the last records after `finish` returns."""
    files = sorted(directory.rglob("offline-run-*/run-*.wandb"))
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        runs = [_read(file) for file in files]
        if all(run.exit_code is not None for run in runs) or time.monotonic() > deadline:
            return runs
        time.sleep(0.1)


def _read(file: Path) -> OfflineRun:
    from wandb.proto import wandb_internal_pb2

    run, names = OfflineRun(file.parent), {}
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run.run_id, run.group, run.job_type = record.run.run_id, record.run.run_group, record.run.job_type
            run.tags = tuple(record.run.tags)
            run.config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        elif kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "summary":
            for item in record.summary.update:
                _put(run.summary, list(item.nested_key) or [item.key], json.loads(item.value_json))
        elif kind == "metric":
            names[len(names) + 1] = record.metric.name
            if record.metric.glob_name:
                run.axes[record.metric.glob_name] = record.metric.step_metric or names.get(
                    record.metric.step_metric_index, ""
                )
        elif kind == "exit":
            run.exit_code = record.exit.exit_code
    return run


def _records(content: bytes) -> Iterator[bytes]:
    """Serialised records; one that was cut by the end of the file is none."""
    assert content[:4] == MAGIC
    place, pieces = 7, b""
    while place + PIECE.size <= len(content):
        if BLOCK - place % BLOCK < PIECE.size:  # the rest of a block is too short for a piece
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = PIECE.unpack_from(content, place)
        if kind not in (WHOLE, FIRST, MIDDLE, LAST):
            return
        place += PIECE.size + length
        data = content[place - length : place]
        pieces = data if kind in (WHOLE, FIRST) else pieces + data
        if kind in (WHOLE, LAST):
            yield pieces


def _items(items: Any) -> dict[str, Any]:
    return {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


def _put(nested: dict[str, Any], keys: list[str], value: Any) -> None:
    for key in keys[:-1]:
        nested = nested.setdefault(key, {})
    nested[keys[-1]] = value
