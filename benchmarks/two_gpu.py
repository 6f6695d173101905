"""`train.py` on two devices, by DDP and by FSDP2, beside one device with twice the micro-batches, from one store.

python benchmarks/two_gpu.py --out benchmarks/results/two_gpu_h200.json
python benchmarks/two_gpu.py --sizes full wide    # also hidden 7168

An update holds the same packs in all runs, so their losses must be the same curve.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import ROOT, write_results
from synthetic import LAYER_IDS, QWEN3_8B, make_rows, make_store, make_verifier

from eagle3lab.config.plan_sizes import stored_bytes_per_token
from eagle3lab.config.schema import Shapes

IN_MEMORY = Path("/dev/shm")
SUPERVISED_SHARE = 0.5


@dataclass(frozen=True)
class Size:
    """What is trained, and on which options of `hardware`."""

    shapes: Shapes
    device: str  # where the verifier runs for the store
    one: str
    two: str
    seq_len: int
    document: int
    num_rows: int
    updates: int
    log_every: int


FULL = Size(QWEN3_8B, "cuda", "h200", "h200x2", 8192, 1024, 256, 200, 10)  # a store of 8.6 GB
# the widths of Kimi-K2.5 and DeepSeek-V3, with a dense verifier of 4 layers; a store of 7.5 GB
KIMI = Shapes(7168, 18432, 4, 64, 64, 128, 163840, 5_000_000_000)
WIDE = Size(KIMI, "cuda", "h200", "h200x2", 4096, 1024, 128, 60, 5)
TINY = Size(Shapes(64, 96, 4, 4, 2, 16, 512, 200_000), "cpu", "cpu", "cpu2", 256, 64, 24, 12, 1)


SIZES = {"full": FULL, "wide": WIDE, "tiny": TINY}


@dataclass(frozen=True)
class Run:
    tokens_per_second: float  # the median logging interval of the run's second half
    losses: dict[int, float]  # by update
    peak_gib: float  # rank 0


def train(
    size: Size,
    verifier: Path,
    store: Path,
    out: Path,
    hardware: str,
    strategy: str,
    *,
    ttt_steps: int,
    micro_batches: int,
) -> Run:
    """One `train.py` whose updates are `micro_batches` packs on each of two devices.

    Its directory is removed afterwards: checkpoints are large.
    """
    command = [
        sys.executable, "train.py", "model=local", "model.name=synthetic", f"model.path={verifier}", "data=jsonl",
        "data.paths=[none]", f"store={store}", f"hardware={hardware}", f"hardware.strategy={strategy}",
        f"draft.ttt_steps={ttt_steps}", f"draft.aux_layer_ids=[{','.join(map(str, LAYER_IDS))}]",
        f"train.seq_len={size.seq_len}", f"train.tokens_per_update={2 * micro_batches * size.seq_len}", "train.max_epochs=null",
        f"train.max_updates={size.updates}", f"train.validate_every_updates={size.updates}",
        f"train.log_every_updates={size.log_every}", "optim.lr=1e-3", "optim.lr_warmup_updates=4", f"run_dir={out}",
    ]  # fmt: skip
    print("$", " ".join(command[1:]), flush=True)
    start = time.perf_counter()
    # one thread each: two ranks of a CPU run must not take each other's cores
    threads = {"OMP_NUM_THREADS": "1"} if size.device == "cpu" else {}
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, **threads})
    print(f"took {time.perf_counter() - start:.0f} s", flush=True)
    summary = json.loads((out / "summary.json").read_text())
    with (out / "metrics.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["train/loss"]]
    shutil.rmtree(out)
    second_half = rows[len(rows) // 2 :]
    return Run(
        statistics.median(float(row["speed/tokens_per_second"]) for row in second_half),
        {int(float(row["update"])): float(row["train/loss"]) for row in rows},
        float(summary["peak_memory_gib"]),
    )


def worst_difference(a: Run, b: Run) -> float:
    """The largest relative difference of two loss curves."""
    assert a.losses.keys() == b.losses.keys()
    return max(abs(a.losses[update] - b.losses[update]) / abs(a.losses[update]) for update in a.losses)


def store_directory(work: Path, size: Size) -> Path:
    """Memory where there is room for the store and more, so that no disk is measured."""
    num_bytes = (
        size.num_rows * (size.document + 1) * stored_bytes_per_token(size.shapes.hidden_size, len(LAYER_IDS))
    )
    room = IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > 1.5 * num_bytes
    return Path(tempfile.mkdtemp(prefix="two_gpu", dir=IN_MEMORY if room else work))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/two_gpu_h200.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument(
        "--sizes", nargs="+", choices=sorted(SIZES), default=["full"], help="tiny: two CPU processes"
    )
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="packs on each of two devices per update"
    )
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    notes: dict[str, Any] = {"micro_batches": arguments.micro_batches, "ttt_steps": arguments.ttt_steps}
    for name in arguments.sizes:
        for row, about in compare(SIZES[name], arguments):
            results.append(row)
            notes[f"{name} {row['strategy']}"] = about
            write_results(arguments.out, results, notes=notes)  # what is measured stays, whatever comes


def compare(size: Size, arguments: argparse.Namespace) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    """Per strategy a row of the results, and the figures of its loss curves."""
    work = arguments.work
    verifier = Path(tempfile.mkdtemp(prefix="verifier", dir=work))
    place = store_directory(work, size)
    try:
        start = time.perf_counter()
        make_verifier(verifier, size.shapes, size.device)
        rows = make_rows(size.num_rows, size.document + 1, size.shapes.vocab_size, SUPERVISED_SHARE)
        tokens = make_store(place / "store", verifier, rows, size.device)
        print(f"store in {place}: {tokens:,} tokens in {time.perf_counter() - start:.0f} s", flush=True)

        def run(name: str, hardware: str, strategy: str) -> Run:
            return train(
                size,
                verifier,
                place / "store",
                work / f"two-gpu-{name}-{os.getpid()}",
                hardware,
                strategy,
                ttt_steps=arguments.ttt_steps,
                micro_batches=arguments.micro_batches,
            )

        one = run("one", size.one, "auto")
        for strategy in arguments.strategies:
            two = run(strategy, size.two, strategy)
            row = {
                "strategy": strategy,
                "hidden": size.shapes.hidden_size,
                "one_tok_s": round(one.tokens_per_second),
                "two_tok_s": round(two.tokens_per_second),
                "ratio": round(two.tokens_per_second / one.tokens_per_second, 4),
                "one_gib": round(one.peak_gib, 2),
                "two_gib": round(two.peak_gib, 2),
                "seq_len": size.seq_len,
            }
            difference = worst_difference(one, two)
            print(f"{row}, loss curves differ by at most {difference:.2e} of the loss", flush=True)
            yield (
                row,
                {
                    "worst_relative_loss_difference": difference,
                    "first_loss": one.losses[min(one.losses)],
                    "last_loss": one.losses[max(one.losses)],
                },
            )
    finally:
        shutil.rmtree(place, ignore_errors=True)
        shutil.rmtree(verifier, ignore_errors=True)


if __name__ == "__main__":
    main()
