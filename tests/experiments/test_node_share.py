"""Trials on one node share its GPUs: every process its own, for as long as it lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import Accelerator, HardwareConfig
from eagle3lab.experiments import node_share
from eagle3lab.experiments.node_share import VISIBLE, share_of_node
from eagle3lab.experiments.trial_process import num_unstarted

WORKER = """
import json, os, sys
from pathlib import Path
from eagle3lab.config.schema import Accelerator, HardwareConfig
from eagle3lab.experiments.node_share import share_of_node
hardware = HardwareConfig(
    name="x", accelerator=Accelerator.cuda, num_devices=int(sys.argv[2]), trials_per_node=4, device_memory_gib=96
)
shares = [share_of_node(hardware, Path(sys.argv[1]), lambda: 8) for _ in range(2)]
said = [[s.num_devices, s.device_memory_gib] for s in shares]
print(json.dumps([os.environ["CUDA_VISIBLE_DEVICES"], said]), flush=True)
sys.stdin.readline()
"""


def start(sweep_dir: Path, tmp_path: Path, devices: int = 8) -> subprocess.Popen[str]:
    environment = {**os.environ, VISIBLE: "8,9,10,11,12,13,14,15", "TMPDIR": str(tmp_path)}
    words = [sys.executable, "-c", WORKER, str(sweep_dir), str(devices)]
    return subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_processes_get_disjoint_gpus_and_a_new_one_those_of_one_that_ended(tmp_path: Path) -> None:
    workers = [start(tmp_path / "sweep", tmp_path) for _ in range(4)]
    said = [json.loads(w.stdout.readline()) for w in workers]  # type: ignore[union-attr]
    assert sorted(visible for visible, _ in said) == ["10,11", "12,13", "14,15", "8,9"]
    assert [shares for _, shares in said] == [[[2, 96], [2, 96]]] * 4
    workers[2].kill()
    workers[2].wait()
    next_one = start(tmp_path / "sweep", tmp_path)
    assert json.loads(next_one.stdout.readline())[0] == said[2][0]  # type: ignore[union-attr]
    for worker in [*workers, next_one]:
        worker.communicate("\n")


def test_more_trials_than_gpus_share_each_and_its_memory(tmp_path: Path) -> None:
    workers = [start(tmp_path / "sweep", tmp_path, devices=2) for _ in range(4)]
    said = [json.loads(w.stdout.readline()) for w in workers]  # type: ignore[union-attr]
    assert sorted(visible for visible, _ in said) == ["8", "8", "9", "9"]
    assert [shares for _, shares in said] == [[[1, 48], [1, 48]]] * 4
    for worker in workers:
        worker.communicate("\n")


@pytest.mark.parametrize(("devices", "trials", "visible"), [(8, 3, 8), (8, 2, 4), (None, 3, 8)])
def test_an_uneven_share_is_refused(devices: int | None, trials: int, visible: int, tmp_path: Path) -> None:
    hardware = HardwareConfig("x", Accelerator.cuda, devices, trials_per_node=trials)
    with pytest.raises(UserError, match="does not share the node's GPUs evenly"):
        share_of_node(hardware, tmp_path, lambda: visible)


def test_loader_threads_are_no_more_than_the_share_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)), raising=False)
    cpu = HardwareConfig("x", Accelerator.cpu, num_loader_threads=6, trials_per_node=8)
    assert share_of_node(cpu, tmp_path, lambda: 0).num_loader_threads == 2
    alone = HardwareConfig("x", Accelerator.cuda, 8, num_loader_threads=6)
    assert share_of_node(alone, tmp_path, lambda: 8) is alone
    assert node_share._slot is None


def test_a_trial_of_several_processes_is_a_command_of_its_own_unless_they_are_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("LOCAL_RANK", "SLURM_NTASKS", "SLURM_JOB_NAME"):
        monkeypatch.delenv(name, raising=False)
    two = HardwareConfig("x", Accelerator.cpu, 2)
    assert num_unstarted(two, lambda: 0) == 2
    assert num_unstarted(HardwareConfig("x"), lambda: 0) is None
    assert num_unstarted(HardwareConfig("x"), lambda: 4) == 4
    monkeypatch.setenv("SLURM_NTASKS", "2")
    assert num_unstarted(two, lambda: 0) is None
