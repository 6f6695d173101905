"""Two gloo processes, whole (DDP) and in shards (FSDP2), against one process on the union of their batches."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3lab.training.checkpoint_files import fault_of

SCRIPT = Path(__file__).with_name("train_tiny.py")
ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
NOISE = 0.05
# 8 packs in updates of 6: the second update of an epoch has one micro-batch per rank instead of three
TRAIN = {"tokens_per_update": 6 * 32, "max_epochs": 2, "log_every_updates": 1}
NORMALISATIONS = ["pack", "sequence"]
OPTIM = {"ema_decay": 0.8, "weight_decay": 0.01}
MUON = {"kind": "muon"}
TOLERANCE = 2e-5  # 1/500 of an Adam step at the rate of 1e-2: gradients are summed in another order


def script_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_tiny", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def job(store: Path, out: Path, devices: int, train: dict[str, Any], **more: Any) -> dict[str, Any]:
    common = {"devices": devices, "train": train, "noise": NOISE, "optim": OPTIM, "step": "pruned"}
    return {"store": str(store), "out": str(out)} | common | more


def launch(command: list[str], jobs: list[dict[str, Any]]) -> str:
    done = subprocess.run(
        [*command, str(SCRIPT), json.dumps(jobs)],
        env=ENVIRONMENT,
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
    assert_same_weights(a, b)


def assert_same_weights(a: Path, b: Path) -> None:
    """The trained weights, and those that would be exported."""
    for file in ("weights.pt", "exported.pt"):
        first, second = (torch.load(p / file, weights_only=True) for p in (a, b))
        assert first.keys() == second.keys()
        assert max(float((first[n] - second[n]).abs().max()) for n in first) < TOLERANCE, file


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one`: one process. `two`, `sharded`: two under torchrun.

    `measured` is `two` with acceptance measured, `stopped` ends by itself.
    `half` and `sharded_half` (measured too) stop early on two ranks and go on on one, `cut` stops early and goes on in shards.
    `pack_one`, `pack_two` and so on: the other normalisations in one process and in two.
    """
    path = tmp_path_factory.mktemp("runs")
    script = script_module()
    tiny = script.load_tiny()
    # five validation rows of two files in three packs: one rank has one fewer
    validation = {"validation": ["code.jsonl:1", "chat.jsonl:2"]}
    rows = [
        replace(row, source=validation.get(row.split, ["chat.jsonl:1"] * 2)[i % 2])
        for i, row in enumerate(tiny.default_rows(12, 5))
    ]
    tiny.write_store(path / "store", rows)
    train = TRAIN
    short = train | {"max_epochs": None, "max_updates": 3}
    # 7 packs in updates of 4: in the second one a rank gets a row without weight
    tiny.write_store(path / "odd", tiny.default_rows(11, 1))
    odd = {"tokens_per_update": 4 * tiny.SEQ_LEN, "max_epochs": 1, "log_every_updates": 1}
    script.run(tiny, job(path / "store", path / "one", 1, train))
    store = path / "store"
    launch(
        TORCHRUN,
        [
            job(store, path / "two", 2, train),
            job(store, path / "measured", 2, train, measure_every=2),
            job(store, path / "stopped", 2, train, measure_every=1, patience=1),
            job(store, path / "half", 2, short),
            job(store, path / "cut", 2, short),
            job(store, path / "sharded", 2, train, strategy="fsdp2"),
            job(store, path / "sharded_half", 2, short, strategy="fsdp2", measure_every=2),
            job(store, path / "cut", 2, train, strategy="fsdp2", resume=True),
            job(store, path / "muon_two", 2, train, optim=MUON, step="reference"),
            job(store, path / "muon_sharded", 2, train, optim=MUON, step="reference", strategy="fsdp2"),
            *(job(path / "odd", path / f"{name}_two", 2, odd, normalisation=name) for name in NORMALISATIONS),
        ],
    )
    for name in NORMALISATIONS:
        script.run(tiny, job(path / "odd", path / f"{name}_one", 1, odd, normalisation=name))
    for name in ("half", "sharded_half"):
        script.run(tiny, job(store, path / name, 1, train, resume=True))
    script.run(tiny, job(store, path / "muon_one", 1, train, optim=MUON, step="reference"))
    return path


@pytest.mark.parametrize("name", ["two", "sharded"])
def test_two_processes_equal_one_on_the_union_of_their_batches(runs: Path, name: str) -> None:
    assert [r["update"] for r in rows(runs / "one") if "train/loss" in r] == [1, 2, 3, 4]
    assert_same_run(runs / "one", runs / name)


def test_figures_by_domain_are_over_the_rows_of_all_ranks(runs: Path) -> None:
    one, two = rows(runs / "one")[-1], rows(runs / "two")[-1]
    names = [f"val/{domain}/{name}" for domain in ("chat", "code") for name in ("accuracy_step0", "loss")]
    assert [two[name] for name in names] == pytest.approx([one[name] for name in names], rel=1e-5)
    assert one["val/chat/loss"] != one["val/code/loss"]


def test_a_rank_that_waits_for_a_measurement_trains_as_if_there_were_none(runs: Path) -> None:
    plain, measured = (
        tensors(torch.load(runs / name / "checkpoints" / "last.ckpt", weights_only=True))
        for name in ("two", "measured")
    )
    assert plain.keys() == measured.keys()
    assert all(torch.equal(plain[name], measured[name]) for name in plain)
    assert [r["update"] for r in rows(runs / "measured") if "val/real_acceptance_length" in r] == [0, 2, 4]


def test_both_ranks_end_early_together(runs: Path) -> None:
    summary = json.loads((runs / "stopped" / "summary.json").read_text())
    assert summary["selection"]["stopped_early"]
    assert summary["updates"] < 4


@pytest.mark.parametrize("name", NORMALISATIONS)
def test_every_normalisation_is_over_all_ranks_and_micro_batches(runs: Path, name: str) -> None:
    assert len([r for r in rows(runs / f"{name}_one") if "train/loss" in r]) == 2
    assert_same_run(runs / f"{name}_one", runs / f"{name}_two")


@pytest.mark.parametrize(("name", "replicas"), [("half", 1), ("sharded_half", 1), ("cut", 2)])
def test_a_run_goes_on_on_another_number_of_ranks_and_under_another_strategy(
    runs: Path, name: str, replicas: int
) -> None:
    summary = json.loads((runs / name / "summary.json").read_text())
    assert summary["resumed_from_update"] == 3
    assert summary["num_replicas"] == replicas
    assert_same_weights(runs / "one", runs / name)
    assert rows(runs / name)[-1] == pytest.approx(rows(runs / "one")[-1], rel=1e-5)  # of the averaged weights


def test_a_rank_keeps_its_share_of_the_optimizer_states(runs: Path) -> None:
    whole, sharded = (
        json.loads((runs / name / "summary.json").read_text())["optimizer_values_held"]
        for name in ("two", "sharded")
    )
    assert 0.5 <= sharded / whole < 0.51


@pytest.mark.parametrize("name", ["muon_two", "muon_sharded"])
def test_muon_on_two_ranks_is_muon_on_one_up_to_its_own_rounding(runs: Path, name: str) -> None:
    # its iteration is in bf16, so that a last bit of a gradient moves a weight by a fiftieth of a step and less
    one, two = (torch.load(runs / n / "weights.pt", weights_only=True) for n in ("muon_one", name))
    assert max(float((one[n] - two[n]).abs().max()) for n in one) < 1e-3
    assert rows(runs / name)[-1] == pytest.approx(rows(runs / "muon_one")[-1], rel=1e-3)


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def on_nodes(
    commands: Sequence[Sequence[str]], jobs: list[dict[str, Any]], environments: Sequence[dict[str, str]]
) -> tuple[list[str], list[int], float]:
    """What each of two nodes printed, its exit code, and the seconds from the end of the first to that of the last."""
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        nodes = [
            subprocess.Popen(
                [*command, str(SCRIPT), json.dumps(jobs)],
                env={**ENVIRONMENT, **environment},
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for command, environment, output in zip(commands, environments, outputs, strict=True)
        ]
        ended: dict[int, float] = {}
        deadline = time.monotonic() + 240
        while len(ended) < len(nodes) and time.monotonic() < deadline:
            ended |= {
                i: time.monotonic() for i, n in enumerate(nodes) if i not in ended and n.poll() is not None
            }
            time.sleep(0.1)
        for node in nodes:
            node.kill()
            node.wait()
        printed = []
        for output in outputs:
            output.seek(0)
            printed.append(output.read())
    assert len(ended) == len(nodes), printed
    return printed, [node.returncode for node in nodes], max(ended.values()) - min(ended.values())


def test_two_nodes_of_slurm_are_one_run_and_one_mistake_is_one_message(runs: Path) -> None:
    slurm = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NNODES": "2"}
    slurm |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    own = [{"SLURM_PROCID": n, "SLURM_NODEID": n, "SLURM_LOCALID": "0"} for n in "01"]
    jobs = [
        job(runs / "store", runs / "nodes", 1, TRAIN, nodes=2),
        job(runs / "store", runs / "failed", 1, TRAIN, nodes=2, fail=[1, 2, "error"]),
    ]
    printed, codes, _ = on_nodes([[sys.executable]] * 2, jobs, [slurm | each for each in own])
    assert_same_run(runs / "one", runs / "nodes")
    assert codes == [1, 2], printed
    assert printed[1].count("error: a file of this node cannot be read") == 1
    assert printed[0].count("error: ") == 1
    assert re.search(r"error: rank 1 \(node 1, .*\) ended: a file of this node cannot be read", printed[0])


def test_a_killed_node_ends_the_other_and_the_run_goes_on_from_its_checkpoint(runs: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    short = TRAIN | {"save_every_updates": 1}
    jobs = [
        job(runs / "store", runs / "sharded_nodes", 1, TRAIN, nodes=2, strategy="fsdp2"),
        job(runs / "store", runs / "killed", 1, short, nodes=2, fail=[1, 3, "kill"]),
    ]
    commands = [[*torchrun, "--node_rank", n] for n in "01"]
    printed, codes, seconds = on_nodes(commands, jobs, [{}, {}])
    assert_same_run(runs / "one", runs / "sharded_nodes")
    assert codes == [1, -signal.SIGKILL], printed
    assert seconds < 60
    assert printed[0].count("error: ") == 1
    assert re.search(r"error: rank 1 \(node 1, .*\) has not been heard of for", printed[0])
    assert "try: train_tiny.py" in printed[0]
    saved = list((runs / "killed" / "checkpoints").glob("*.ckpt"))
    assert saved
    assert [fault_of(path) for path in saved] == [None] * len(saved)
    script = script_module()
    script.run(script.load_tiny(), job(runs / "store", runs / "killed", 1, TRAIN, resume=True))
    assert json.loads((runs / "killed" / "summary.json").read_text())["resumed_from_update"] in (2, 3)
    assert_same_weights(runs / "one", runs / "killed")


def tensors(value: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its place in it."""
    if isinstance(value, torch.Tensor):
        return {prefix: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return {place: t for key, item in items for place, t in tensors(item, f"{prefix}/{key}").items()}


@pytest.mark.parametrize("file", ["last.ckpt", "best.ckpt"])
def test_a_checkpoint_of_shards_is_the_one_that_whole_weights_give(runs: Path, file: str) -> None:
    whole, sharded = (
        tensors(torch.load(runs / name / "checkpoints" / file, weights_only=True))
        for name in ("two", "sharded")
    )
    assert {n: (t.shape, t.dtype) for n, t in whole.items()} == {
        n: (t.shape, t.dtype) for n, t in sharded.items()
    }
    assert {name.split("/")[1] for name in whole} == {"state_dict", "optimizer_states", "average"}
    for name, tensor in whole.items():
        assert torch.allclose(tensor, sharded[name], rtol=1e-4, atol=TOLERANCE), name


def test_one_rank_writes_and_both_metrics_and_checkpoints_are_there(runs: Path) -> None:
    names = sorted(p.name for p in (runs / "two").iterdir())
    assert names == ["checkpoints", "exported.pt", "metrics.csv", "summary.json", "weights.pt"]
    assert sorted(p.name for p in (runs / "two" / "checkpoints").iterdir()) == [
        "best.ckpt",
        "last.ckpt",
        "previous.ckpt",
    ]


@pytest.mark.slow
def test_without_torchrun_the_command_starts_its_other_rank_itself(runs: Path) -> None:
    printed = launch([sys.executable], [job(runs / "store", runs / "own", 2, TRAIN)])
    assert printed.count("update 1/4  tokens") == 1
    assert_same_run(runs / "one", runs / "own")
