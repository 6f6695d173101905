"""Two gloo processes against one process on the union of their batches."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("train_tiny.py")
ROOT = Path(__file__).parents[2]
NOISE = 0.05
TOLERANCE = 1e-5  # a thousandth of one Adam step at the rate of 1e-2: gradients are summed in another order


def script_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(store: Path, out: Path, devices: int, train: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"store": str(store), "out": str(out), "devices": devices, "train": train, "noise": NOISE} | more


def launch(command: list[str], jobs: list[dict[str, Any]]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, str(SCRIPT), json.dumps(jobs)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


def rows(path: Path) -> list[dict[str, float]]:
    with (path / "metrics.csv").open(newline="") as f:
        return [
            {k: float(v) for k, v in r.items() if v and not k.startswith("speed/")} for r in csv.DictReader(f)
        ]


def assert_same_run(a: Path, b: Path) -> None:
    for one, two in zip(rows(a), rows(b), strict=True):
        assert one == pytest.approx(two, rel=1e-5, abs=1e-7)
    first, second = (torch.load(p / "weights.pt", weights_only=True) for p in (a, b))
    assert first.keys() == second.keys()
    assert max(float((first[n] - second[n]).abs().max()) for n in first) < TOLERANCE


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: one process. `two`: two under torchrun. `half` stops early on two ranks and goes on on one."""
    path = tmp_path_factory.mktemp("runs")
    script = script_module()
    tiny = script.load_tiny()
    # five validation rows in three packs: one rank has one fewer
    tiny.write_store(path / "store", tiny.default_rows(12, 5))
    # 8 packs in updates of 6: the second update of an epoch has one micro-batch per rank instead of three
    train = {"tokens_per_update": 6 * tiny.SEQ_LEN, "max_epochs": 2, "log_every_updates": 1}
    short = train | {"max_epochs": None, "max_updates": 3}
    script.run(tiny, job(path / "store", path / "one", 1, train))
    launch(
        TORCHRUN,
        [job(path / "store", path / "two", 2, train), job(path / "store", path / "half", 2, short)],
    )
    script.run(tiny, job(path / "store", path / "half", 1, train, resume=True))
    return path


def test_two_processes_equal_one_on_the_union_of_their_batches(runs: Path) -> None:
    assert [r["update"] for r in rows(runs / "one") if "train/loss" in r] == [1, 2, 3, 4]
    assert_same_run(runs / "one", runs / "two")


def test_a_run_begun_on_two_ranks_goes_on_on_one(runs: Path) -> None:
    summary = json.loads((runs / "half" / "summary.json").read_text())
    assert summary["resumed_from_update"] == 3
    assert summary["num_replicas"] == 1
    one, half = (torch.load(runs / n / "weights.pt", weights_only=True) for n in ("one", "half"))
    assert max(float((one[n] - half[n]).abs().max()) for n in one) < TOLERANCE


def test_one_rank_writes_and_both_metrics_and_checkpoints_are_there(runs: Path) -> None:
    names = sorted(p.name for p in (runs / "two").iterdir())
    assert names == ["checkpoints", "metrics.csv", "summary.json", "weights.pt"]
    assert sorted(p.name for p in (runs / "two" / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]


@pytest.mark.slow
def test_without_torchrun_the_command_starts_its_other_rank_itself(runs: Path) -> None:
    train = {"tokens_per_update": 6 * 32, "max_epochs": 2, "log_every_updates": 1}
    printed = launch([sys.executable], [job(runs / "store", runs / "own", 2, train)])
    assert printed.count("update 1/4  tokens") == 1
    assert_same_run(runs / "one", runs / "own")
