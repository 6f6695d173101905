"""Sweeps as a user runs them: a failing trial, the launchers, a kill and what continues it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ("-m", "model=tiny", "hardware=cpu", "train.max_updates=2", "train.seq_len=256", "train.self_test=false",
           "train.validate_untrained=false", "train.save_every_updates=1", "optim.lr_warmup_updates=0",
           "noise=uniform0.05")  # fmt: skip
TWO = (*COMMAND, "noise.scale=0.05,0.1")
OVERFLOWS = "1e39"  # more than float32 holds


def weights(sweep_dir: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Trial -> the exported weights."""
    drafts = sorted(sweep_dir.glob("*/draft"))
    return {draft.parent.name: load_file(draft / "model.safetensors") for draft in drafts}


def same(one: Path, other: Path) -> bool:
    """Whether two trials are in both and their weights are equal to the bit."""
    a, b = weights(one), weights(other)
    return (
        len(a) == 2
        and a.keys() == b.keys()
        and all(
            a[trial].keys() == b[trial].keys() and torch.equal(a[trial][name], b[trial][name])
            for trial in a
            for name in a[trial]
        )
    )


# of a comparison.csv: what the machine decides, and where the trial lies
UNLIKE = {
    "tokens_per_second",
    "peak_memory_gib",
    "data_wait_share",
    "mfu",
    "train_seconds",
    "limited_by",
    "run_dir",
}


def table(sweep_dir: Path) -> list[dict[str, str]]:
    """The rows of the finished trials in the sweep's comparison, with every cell that two sweeps have in common."""
    with open(sweep_dir / "comparison.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "finished"]
    return [{name: cell for name, cell in row.items() if name not in UNLIKE} for row in rows]


def states(sweep_dir: Path) -> list[str]:
    return [trial["state"] for trial in json.loads((sweep_dir / "sweep.json").read_text())["trials"]]


@pytest.fixture(scope="module")
def basic(run_command: Callable, workspace: Path) -> subprocess.CompletedProcess[str]:
    """Trials one after the other, which those of the launchers must equal; the last one fails."""
    scales = f"noise.scale=0.05,0.1,{OVERFLOWS}"
    return run_command("train.py", *COMMAND, scales, "hydra.sweep.dir=basic", expect=1)


def test_a_trial_that_fails_is_reported_and_the_others_run(
    basic: subprocess.CompletedProcess[str], workspace: Path
) -> None:
    assert states(workspace / "basic") == ["finished", "finished", "failed"]
    assert "error: trial 2 failed: " in basic.stderr
    assert "2 of 3 trials finished, 1 failed" in basic.stdout
    assert "hydra.sweep.dir=" in basic.stdout.partition("to go on with the other 1:")[2]
    assert basic.stdout.index("sweep train: 3 trials") < basic.stdout.index("run tiny-demo")


def test_a_sweep_ends_with_table_plot_and_page(
    basic: subprocess.CompletedProcess[str], workspace: Path
) -> None:
    for name in ("comparison.csv", "comparison.png", "comparison.html"):
        assert (workspace / "basic" / name).stat().st_size > 0
    text = (workspace / "basic/comparison.csv").read_text()
    assert (text.count("finished"), text.count("failed")) == (2, 1)


def test_a_mistake_in_any_trial_is_told_before_the_first_begins(
    run_command: Callable, workspace: Path
) -> None:
    mistake = ("draft.ttt_steps=3,99", "hydra.sweep.dir=mistaken")
    done = run_command("train.py", *COMMAND, *mistake, expect=2)
    assert "error: draft.ttt_steps: 99; expected" in done.stderr
    assert not (workspace / "mistaken").exists()


@pytest.mark.slow  # three processes that each import torch; what runs in them is what Ray's run
def test_submitit_gives_the_results_of_one_after_the_other(
    basic: object, run_command: Callable, workspace: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    run_command("train.py", *TWO, "launcher=submitit_local", "hydra.sweep.dir=submitit")
    assert same(workspace / "submitit", workspace / "basic")


def test_ray_gives_the_results_of_one_after_the_other(
    basic: object, run_command: Callable, workspace: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_ray_launcher")
    run_command("train.py", *TWO, "launcher=ray", "hydra.sweep.dir=ray", HOME=str(workspace))
    assert same(workspace / "ray", workspace / "basic")
    assert (workspace / "ray/trials/001.log").read_text().count("exported ") == 1


def test_a_killed_sweep_is_continued_by_joblib_to_the_same_end(
    basic: object, run_command: Callable, workspace: Path
) -> None:
    pytest.importorskip("hydra_plugins.hydra_joblib_launcher")
    killed = workspace / "killed"
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3LAB_", "HYDRA_"))}
    process = subprocess.Popen(
        [sys.executable, str(ROOT / "train.py"), *TWO, "hydra.sweep.dir=killed"],
        cwd=workspace,
        env={
            **variables,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
        },
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    deadline = time.monotonic() + 200
    while not list(killed.glob("*/checkpoints/last.ckpt")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert not list(killed.glob("01-*"))

    beside = ("launcher=joblib", "hardware.trials_per_node=2")
    done = run_command("train.py", *TWO, *beside, "hydra.sweep.dir=killed")
    assert "taken up again: 1 had begun" in done.stdout
    assert same(killed, workspace / "basic")
    assert len(table(killed)) == 2
    assert table(killed) == table(workspace / "basic")
    first, second = (json.loads(path.read_text()) for path in sorted(killed.glob("*/summary.json")))
    assert (first["resumed_from_update"], second["resumed_from_update"]) == (1, 0)
