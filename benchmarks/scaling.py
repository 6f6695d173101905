"""`train.py` on several devices, by DDP and by FSDP2, beside one device with as many packs in an update, from one store.

python benchmarks/scaling.py --out benchmarks/results/scaling_h200x2.json
python benchmarks/scaling.py --sizes wide --out benchmarks/results/scaling_wide_h200x2.json    # hidden 7168
python benchmarks/scaling.py --devices 4 --strategies ddp --out benchmarks/results/scaling_h200x4.json \
    --one-from benchmarks/results/scaling_h200x2.json    # what one device did before, in the same lease of the machine

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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import ROOT, write_results
from synthetic import LAYER_IDS, QWEN3_8B, make_rows, make_store, make_verifier, train_words

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
    several: str
    seq_len: int
    document: int
    num_rows: int
    updates: int
    log_every: int


FULL = Size(QWEN3_8B, "cuda", "h200", "h200x2", 8192, 1024, 256, 150, 10)  # a store of 8.6 GB
# the widths of Kimi-K2.5 and DeepSeek-V3, with a dense verifier of 4 layers; a store of 7.5 GB
KIMI = Shapes(7168, 18432, 4, 64, 64, 128, 163840, 5_000_000_000)
WIDE = Size(KIMI, "cuda", "h200", "h200x2", 4096, 1024, 128, 70, 5)
TINY = Size(Shapes(64, 96, 4, 4, 2, 16, 512, 200_000), "cpu", "cpu", "cpu2", 256, 64, 24, 12, 1)


SIZES = {"full": FULL, "wide": WIDE, "tiny": TINY}


@dataclass(frozen=True)
class Run:
    tokens_per_second: float  # the median logging interval of the run's second half
    losses: dict[str, float]  # by update
    peak_gib: float  # rank 0
    data_wait_share: float
    read_gb_per_second: float  # all devices


class Bench:
    """One size: its verifier and store, and the runs over it."""

    def __init__(self, name: str, arguments: argparse.Namespace) -> None:
        self.name, self.size, self.arguments = name, SIZES[name], arguments
        self.work: Path = arguments.work
        self.verifier = Path(tempfile.mkdtemp(prefix="verifier", dir=self.work))
        self.place = store_directory(self.work, self.size)
        self.store = self.place / "store"

    def prepare(self) -> None:
        size, start = self.size, time.perf_counter()
        make_verifier(self.verifier, size.shapes, size.device)
        rows = make_rows(size.num_rows, size.document + 1, size.shapes.vocab_size, SUPERVISED_SHARE)
        tokens = make_store(self.store, self.verifier, rows, size.device)
        print(
            f"store in {self.place}: {tokens:,} tokens in {time.perf_counter() - start:.0f} s",
            flush=True,
        )

    def train(self, hardware: str, num_devices: int, strategy: str) -> Run:
        """One `train.py`; its directory is removed afterwards: checkpoints are large."""
        size, out = self.size, self.work / f"scaling-{self.name}-{strategy}-{num_devices}-{os.getpid()}"
        command = [
            sys.executable, "train.py",
            *train_words(self.verifier, self.store, seq_len=size.seq_len, ttt_steps=self.arguments.ttt_steps),
            f"hardware={hardware}", f"hardware.num_devices={num_devices}", f"hardware.strategy={strategy}",
            f"train.tokens_per_update={self.arguments.packs * size.seq_len}", "train.max_epochs=null",
            f"train.max_updates={size.updates}", f"train.validate_every_updates={size.updates}",
            f"train.log_every_updates={size.log_every}", "optim.lr=1e-3", "optim.lr_warmup_updates=4",
            f"run_dir={out}",
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
            {str(int(float(row["update"]))): float(row["train/loss"]) for row in rows},
            float(summary["peak_memory_gib"]),
            float(summary["data_wait_share"]),
            float(summary["read_gb_per_second"]),
        )

    def one(self) -> Run:
        """One device, run now or taken from the results of a run with the same packs."""
        before: Path | None = self.arguments.one_from
        if before is None:
            return self.train(self.size.one, 1, "auto")
        notes = json.loads(before.read_text())["notes"]
        mine = {"packs": self.arguments.packs, "ttt_steps": self.arguments.ttt_steps}
        assert {key: notes[key] for key in mine} == mine, f"{before} is of another update"
        return Run(**notes[f"{self.name} one"])

    def compare(self, one: Run) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
        """Per strategy a row of the results, and the figures of its loss curves."""
        devices = self.arguments.devices
        for strategy in self.arguments.strategies:
            several = self.train(self.size.several, devices, strategy)
            row = {
                "strategy": strategy,
                "hidden": self.size.shapes.hidden_size,
                "devices": devices,
                "one_tok_s": round(one.tokens_per_second),
                "all_tok_s": round(several.tokens_per_second),
                "ratio": round(several.tokens_per_second / one.tokens_per_second, 4),
                "efficiency": round(several.tokens_per_second / one.tokens_per_second / devices, 4),
                "one_gib": round(one.peak_gib, 2),
                "each_gib": round(several.peak_gib, 2),
                "data_wait_share": round(several.data_wait_share, 4),
                "read_gb_s": round(several.read_gb_per_second, 2),
                "seq_len": self.size.seq_len,
            }
            difference = worst_difference(one, several)
            print(f"{row}, loss curves differ by at most {difference:.2e} of the loss", flush=True)
            yield (
                row,
                {
                    "worst_relative_loss_difference": difference,
                    "first_loss": next(iter(several.losses.values())),
                    "last_loss": list(several.losses.values())[-1],
                },
            )

    def close(self) -> None:
        shutil.rmtree(self.place, ignore_errors=True)
        shutil.rmtree(self.verifier, ignore_errors=True)


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
    return Path(tempfile.mkdtemp(prefix="scaling", dir=IN_MEMORY if room else work))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/scaling_h200x2.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument(
        "--sizes", nargs="+", choices=sorted(SIZES), default=["full"], help="tiny: CPU processes"
    )
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--packs", type=int, default=4, help="in an update; a multiple of the devices")
    parser.add_argument("--one-from", type=Path, help="results whose figures of one device are compared with")
    parser.add_argument("--strategies", nargs="+", default=["ddp", "fsdp2"])
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    notes: dict[str, Any] = {"packs": arguments.packs, "ttt_steps": arguments.ttt_steps}
    for name in arguments.sizes:
        bench = Bench(name, arguments)
        try:
            bench.prepare()
            one = bench.one()
            notes[f"{name} one"] = asdict(one)
            for row, about in bench.compare(one):
                results.append(row)
                notes[f"{name} {row['strategy']}"] = about
                write_results(arguments.out, results, notes=notes)  # what is measured stays, whatever comes
        finally:
            bench.close()


if __name__ == "__main__":
    main()
