"""SIGKILL at random moments of writing: what is resumed has the bytes of what was never interrupted."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3lab.config.errors import UserError
from eagle3lab.store.index import read_index
from eagle3lab.store.manifest import is_complete, is_store
from eagle3lab.store.reader import StoreReader

NUM_ROWS, MAX_ATTEMPTS = 60, 300


def in_child(work: Callable[[], object]) -> int:
    """Start `work` in a forked process (torch is loaded already); returns its id."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def what_is_left(path: Path) -> str:
    """Where the kill hit, from the files it left."""
    if not is_store(path):
        return "before the manifest"
    entries, torn = read_index(path)
    shards = {p.name for p in (path / "shards").iterdir() if p.suffix == ".safetensors"}
    if torn:
        return "inside an index line"
    if list(path.rglob("*.tmp")):
        return "inside a file"
    if len(shards) > len(entries):
        return "between shard and index"
    return "between shards" if len(entries) < len(shards) or shards else "before the first shard"


@pytest.mark.parametrize(
    ("dtype", "last_state_rows", "num_kills"),
    [("bfloat16", "all", 20), ("float8_e4m3", "all", 5), ("bfloat16", "supervised", 5)],
)
def test_a_store_that_was_killed_and_resumed_has_the_bytes_of_an_uninterrupted_one(
    tmp_path: Path,
    fake: SimpleNamespace,
    dtype: str,
    last_state_rows: str,
    num_kills: int,
    capsys: pytest.CaptureFixture,
) -> None:
    rows = fake.rows(NUM_ROWS)
    manifest = fake.manifest(dtype=dtype, last_state_rows=last_state_rows)
    start = time.perf_counter()
    child = in_child(lambda: fake.write(tmp_path / "whole", rows, manifest, shard_tokens=30))
    assert os.waitpid(child, 0)[1] == 0
    window = 0.7 * (time.perf_counter() - start)
    whole = fake.tree(tmp_path / "whole")
    rng, moments, num_stores = random.Random(0), Counter[str](), 0
    for attempt in range(MAX_ATTEMPTS):
        if sum(moments.values()) == num_kills:
            break
        path = tmp_path / f"store{num_stores}"
        child = in_child(lambda path=path: fake.write(path, rows, manifest, shard_tokens=30))
        time.sleep(rng.uniform(0, window))
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
        if os.WIFSIGNALED(status) and not is_complete(path):  # a kill may also come behind the last write
            moments[what_is_left(path) if path.exists() else "before the directory"] += 1
            with pytest.raises(UserError):
                StoreReader(path)
            if attempt % 2:  # every second one is killed once more before it may end
                continue
        else:
            window *= 0.9
        fake.write(path, rows, manifest, shard_tokens=30)
        assert fake.tree(path) == whole, attempt
        num_stores += 1
    with capsys.disabled():
        print(
            f"\n{dtype}, {last_state_rows}: {num_kills} kills, {num_stores} stores, all byte-identical; {dict(moments)}"
        )
    assert sum(moments.values()) == num_kills
    assert num_stores >= num_kills // 2


def test_a_kill_before_every_single_step_to_the_disk_leaves_a_store_that_resumes(
    tmp_path: Path, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, manifest = fake.rows(8), fake.manifest()
    fake.write(tmp_path / "whole", rows, manifest)
    whole, killed = fake.tree(tmp_path / "whole"), True
    num_steps = 0
    while killed:
        path = tmp_path / f"store{num_steps}"

        def write_and_die(path: Path = path, survived: int = num_steps) -> None:
            left = iter(range(survived))
            for name in ("fsync", "replace", "unlink"):
                step = getattr(os, name)
                monkeypatch.setattr(
                    os, name, lambda *a, step=step, **k: (next_or_die(left), step(*a, **k))[1]
                )
            fake.write(path, rows, manifest)

        killed = os.WIFSIGNALED(os.waitpid(in_child(write_and_die), 0)[1])
        fake.write(path, rows, manifest)
        assert fake.tree(path) == whole, num_steps
        num_steps += killed
    assert num_steps > 20


def next_or_die(left: Iterator[int]) -> None:
    if next(left, None) is None:
        os.kill(os.getpid(), signal.SIGKILL)
