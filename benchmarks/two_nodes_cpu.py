"""Two nodes on one machine, with gloo: training beside one node, a node or the network lost, extraction in parts.

python benchmarks/two_nodes_cpu.py --out benchmarks/results/two_nodes_cpu.json

Where `ip netns` works (as root), a node is a network namespace of its own, and its cable can be pulled; else it is an
address of this machine, and that row is left out.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write_results
from safetensors.torch import load_file
from simulated_nodes import ENVIRONMENT, Launched, Node, children, kill, launch, run, two_nodes

TRAIN = ("model=tiny", "store=store", "optim.lr_warmup_updates=2", "train.seq_len=512",
         "train.tokens_per_update=2048", "train.log_every_updates=1", "noise=uniform0.05")  # fmt: skip
TWO_NODES = ("hardware=cpu2", "hardware.num_nodes=2", "hardware.num_devices=1")
EXTRACT = ("model=tiny", "hardware=cpu", "extract.shard_tokens=2048")
LAUNCHERS = {"basic": (), "joblib": ("launcher=joblib", "hardware.trials_per_node=2"),
             "submitit_local": ("launcher=submitit_local",)}  # fmt: skip
WAIT_SECONDS = 120.0


def metrics(run_dir: Path) -> list[dict[str, float]]:
    with (run_dir / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [{k: float(v) for k, v in row.items() if v and not k.startswith("speed/")} for row in rows]


def weights(run_dir: Path) -> dict[str, torch.Tensor]:
    return load_file(run_dir / "draft" / "model.safetensors")


def difference(a: Path, b: Path) -> dict[str, Any]:
    """Largest differences of two runs: of every logged figure, relative, and of the exported weights."""
    ours, theirs = metrics(a), metrics(b)
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    figures = [(x[k], y[k]) for x, y in zip(ours, theirs, strict=True) for k in x]
    one, two = weights(a), weights(b)
    return {
        "logged_figures": len(figures),
        "largest_relative_difference": max(abs(x - y) / max(abs(x), 1e-12) for x, y in figures),
        "largest_weight_difference": max(float((one[n].float() - two[n].float()).abs().max()) for n in one),
    }


def only_run(work: Path, name: str) -> Path:
    """The directory of a run: there must be one, whichever node made it."""
    (found,) = (work / "outputs" / name).iterdir()
    return found


def train_on(nodes: Sequence[Node], work: Path, kind: str, name: str, *words: str) -> Launched:
    return launch(kind, nodes, work, name, (*TRAIN, *TWO_NODES, f"run_name={name}", *words))


def equal_results(nodes: Sequence[Node], work: Path) -> list[dict[str, Any]]:
    """Two nodes against two processes of one node, and against one process."""
    words = ("train.max_epochs=2", "train.validate_every_updates=6")
    train = str(ROOT / "train.py")
    run(work, train, *TRAIN, *words, "hardware=cpu", "run_dir=one")
    local = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    run(work, *local, train, *TRAIN, *words, "hardware=cpu2", "run_dir=two_processes")
    rows = []
    for name, kind, more in (
        ("torchrun", "torchrun", ()),
        ("slurm", "slurm", ()),
        ("fsdp2", "torchrun", ("hardware.strategy=fsdp2",)),
    ):
        launched = train_on(nodes, work, kind, name, *words, *more)
        codes = launched.wait()
        assert codes == [0, 0], launched.text(0) + launched.text(1)
        for reference in ("two_processes", "one"):
            row = {"check": f"two nodes by {name} against {reference.replace('_', ' ')}", "exit_codes": codes}
            rows.append(row | difference(work / reference, only_run(work, name)))
            print(rows[-1], flush=True)
    return rows


def lose(nodes: Sequence[Node], work: Path, what: str, kind: str = "torchrun") -> dict[str, Any]:
    """Lose `what` in mid-run; how the node that is left ends, and that the run goes on to its end afterwards."""
    name = what.replace(" ", "_")
    words = ("train.max_epochs=5", "train.save_every_updates=10", "train.validate_every_updates=45")
    launched = train_on(nodes, work, kind, name, *words)
    while "update 25/" not in launched.text(0):
        assert launched.nodes[0].poll() is None, launched.text(0)
        time.sleep(0.2)
    lost = 0 if what == "first node" else 1
    began = time.monotonic()
    if what == "network":
        subprocess.run(nodes[1].pull_cable, check=True)
    elif what == "one process":
        os.kill(children(launched.nodes[1].pid)[0], signal.SIGKILL)
    else:
        kill(launched.nodes[lost].pid)
    codes = launched.wait([1 - lost], WAIT_SECONDS)
    seconds = launched.ended.get(1 - lost, float("inf")) - began
    if what == "network":
        launched.wait([1], 5.0)
        kill(launched.nodes[1].pid)
        subprocess.run(nodes[1].put_cable, check=True)
    run_dir = only_run(work, name)
    resumed = run(
        work, str(ROOT / "train.py"), *TRAIN, *words, "hardware=cpu", f"run_dir={run_dir}", "resume=true"
    )
    at = re.search(r"resume .*: (\d+) of \d+ updates made", resumed)
    row = {
        "check": f"{what} lost",
        "seconds_until_the_other_node_ended": round(seconds, 1),
        "its_exit_code": codes[0],
        "its_messages": launched.errors(1 - lost),
        "resumed_from_update": int(at[1]) if at else None,
    }
    print(row, flush=True)
    return row


def one_node_does_not_see_the_store(nodes: Sequence[Node], work: Path) -> dict[str, Any]:
    """Node 1 gives another path, where nothing is: both end with its message, and no run directory is made."""
    began = time.monotonic()
    launched = launch("slurm", nodes, work, "unseen", (*TRAIN, *TWO_NODES, "run_name=unseen"), hide="store")
    codes = launched.wait(seconds=WAIT_SECONDS)
    row = {
        "check": "the second node does not see the store",
        "seconds_from_start": round(time.monotonic() - began, 1),
        "exit_codes": codes,
        "messages": [launched.errors(0), launched.errors(1)],
        "run_directory_made": (work / "outputs" / "unseen").exists(),
    }
    print(row, flush=True)
    return row


def same_files(a: Path, b: Path) -> bool:
    """Whether two stores hold the same bytes; what they tell of their making is left out."""
    ours, theirs = (
        {
            str(p.relative_to(s)): p.read_bytes()
            for p in s.rglob("*")
            if p.is_file() and "logs" not in p.relative_to(s).parts
        }
        for s in (a, b)
    )
    return ours == theirs


def extraction_in_parts(work: Path) -> list[dict[str, Any]]:
    """Two parts by every launcher, joined; a part that is killed, one that is missing, one of other settings."""
    extract, merge = str(ROOT / "extract.py"), ("-m", "eagle3lab", "store", "merge")
    parts = ("extract.num_parts=2", "extract.part=0,1")
    rows: list[dict[str, Any]] = []
    for name, words in LAUNCHERS.items():
        began = time.monotonic()
        run(work, extract, "-m", *EXTRACT, f"store={name}", *parts, *words)
        seconds = time.monotonic() - began
        run(work, *merge, name)
        same = same_files(work / "store", work / name)
        rows.append({"check": f"parts by {name}", "seconds": round(seconds, 1), "bytes_of_one_run": same})
        print(rows[-1], flush=True)

    one = (*EXTRACT, "store=cut", "extract.num_parts=2")
    run(work, extract, *one, "extract.part=0")
    missing = run(work, *merge, "cut", expect=2).strip()
    process = subprocess.Popen(
        (sys.executable, extract, *one, "extract.part=1"),
        cwd=work,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
    )
    while len(list((work / "cut.part1of2" / "shards").glob("*.safetensors"))) < 2 and process.poll() is None:
        time.sleep(0.002)
    kill(process.pid)
    process.wait()
    unfinished = run(work, *merge, "cut", expect=2).strip()
    resumed = run(work, extract, *one, "extract.part=1")
    run(work, *merge, "cut")
    rows.append(
        {
            "check": "a part is missing, then killed, then run again",
            "missing": missing,
            "killed": unfinished,
            "again": re.findall(r"going on: .*", resumed),
            "bytes_of_one_run": same_files(work / "store", work / "cut"),
        }
    )
    run(work, extract, *EXTRACT, "store=mixed", "extract.num_parts=2", "extract.part=0")
    run(work, extract, *EXTRACT, "store=mixed", "extract.num_parts=2", "extract.part=1", "data.max_len=96")
    mixed = run(work, *merge, "mixed", expect=2).strip()
    rows.append({"check": "parts of different settings", "differ": re.findall(r"another (\w+):", mixed)})
    print(*rows[-2:], sep="\n", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="default: a temporary directory")
    arguments = parser.parse_args()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="eagle3lab-two-nodes-"))
    work.mkdir(parents=True, exist_ok=True)
    try:
        run(work, str(ROOT / "extract.py"), *EXTRACT, "store=store")
        with two_nodes() as nodes:
            rows = equal_results(nodes, work)
            losses = ["second node", "first node", "one process", *["network"] * bool(nodes[1].pull_cable)]
            rows += [lose(nodes, work, what) for what in losses]
            if nodes[1].pull_cable:
                rows.append(one_node_does_not_see_the_store(nodes, work))
            isolated = bool(nodes[1].pull_cable)
        rows += extraction_in_parts(work)
        rows = json.loads(json.dumps(rows).replace(f"{work}/", ""))  # where files lay says nothing
        write_results(arguments.out, rows, notes={"network_namespaces": isolated})
    finally:
        if not arguments.work:
            shutil.rmtree(work)


if __name__ == "__main__":
    main()
