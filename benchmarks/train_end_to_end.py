"""`train.py` from a store on disk, in bf16 and in fp8, beside the bare loop of the same step, in one run.

python benchmarks/train_end_to_end.py --out benchmarks/results/end_to_end_h200.json

The stores are larger than all packs that the loader ever holds. `mfu` counts needed work alone (config/flops.py)
and is a share of what a bf16 matrix product of this device reaches in the same run.
"""

from __future__ import annotations

import argparse
import gc
import json
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bare_loop import BareLoop
from common import ROOT, matmul_ceiling, write_results
from synthetic import QWEN3_8B, make_rows, make_store, make_verifier, train_words

from eagle3lab.config.schema import Shapes
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.packing import PackBatchSampler
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.loader import PackLoader

STORAGE = {"bf16": "bfloat16", "fp8": "float8_e4m3"}


@dataclass(frozen=True)
class Size:
    shapes: Shapes
    device: str
    hardware: str
    seq_len: int
    document: int
    num_rows: int
    threads: tuple[int, ...]  # to read with, when nothing is trained


FULL = Size(QWEN3_8B, "cuda", "h200", 8192, 1024, 192, (1, 6, 12))  # 6.4 GB in bf16
TINY = Size(Shapes(64, 96, 4, 4, 2, 16, 512, 200_000), "cpu", "cpu", 256, 64, 24, (1, 2))


def loader_alone(size: Size, store: Path, num_threads: int, packs: int = 48) -> dict[str, float]:
    """What the loader delivers to the device when nothing is trained, after its first third."""
    data = Eagle3SampleFileDataset(StoreReader(store), split="train", raw=True)
    order = PackBatchSampler(data.lengths, size.seq_len).plan(0)
    device = torch.device(size.device)
    collate = create_collate_fn(size.seq_len, pin_memory=size.device == "cuda")
    loader = PackLoader(data, (order * packs)[:packs], collate, num_threads=num_threads, device=device)
    start, read, seen = 0.0, 0, 0
    for i, _ in enumerate(loader):
        if i == packs // 3:
            wait(size)
            start, read, seen = time.perf_counter(), loader.bytes_read, i
    wait(size)
    seconds = time.perf_counter() - start
    loader.finish_check()
    return {
        "tok_s": round(size.seq_len * (packs - 1 - seen) / seconds),
        "gb_s": round((loader.bytes_read - read) / seconds / 1e9, 2),
    }


def wait(size: Size) -> None:
    if size.device == "cuda":
        torch.cuda.synchronize()


def train(
    size: Size, verifier: Path, store: Path, out: Path, ttt_steps: int, updates: int, step: str
) -> dict[str, Any]:
    """`summary.json` of a real `train.py` run, whose directory is removed."""
    command = [
        sys.executable, "train.py", *train_words(verifier, store, seq_len=size.seq_len, ttt_steps=ttt_steps),
        f"hardware={size.hardware}", f"draft.step={step}", "train.max_epochs=null", f"train.max_updates={updates}",
        f"train.validate_every_updates={updates}", f"run_dir={out}",
    ]  # fmt: skip
    print("$", " ".join(command[1:]), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    summary = json.loads((out / "summary.json").read_text())
    shutil.rmtree(out)
    return summary


def bare_speed(loop: BareLoop, size: Size) -> float:
    speed = loop.tokens_per_second(12)
    gc.collect()
    if size.device == "cuda":
        torch.cuda.empty_cache()
    return speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/end_to_end_h200.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument("--updates", type=int, default=120)
    parser.add_argument("--step", default="pruned", choices=["pruned", "reference"])
    parser.add_argument("--ttt-steps", type=int, nargs="+", default=[3])
    parser.add_argument("--storage", nargs="+", default=list(STORAGE), choices=list(STORAGE))
    parser.add_argument("--tiny", action="store_true", help="on a CPU: does it run, not how fast")
    arguments = parser.parse_args()
    size, work = TINY if arguments.tiny else FULL, arguments.work
    work.mkdir(parents=True, exist_ok=True)

    verifier = work / "verifier"
    ceiling = 1e12 if arguments.tiny else matmul_ceiling()
    print(f"bf16 matmul ceiling {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    make_verifier(verifier, size.shapes, size.device)
    rows = make_rows(size.num_rows, size.document + 1, size.shapes.vocab_size, 0.5)
    stores, notes = {}, {"matmul_tflops": ceiling / 1e12, "step": arguments.step}
    for storage in arguments.storage:
        stores[storage], start = work / f"store-{storage}", time.perf_counter()
        shutil.rmtree(stores[storage], ignore_errors=True)
        tokens = make_store(stores[storage], verifier, rows, size.device, dtype=STORAGE[storage])
        num_bytes = sum(file.stat().st_size for file in stores[storage].rglob("*.safetensors"))
        print(
            f"{storage} store: {tokens:,} tokens, {num_bytes / 1e9:.1f} GB in {time.perf_counter() - start:.0f} s"
        )
        alone = {n: loader_alone(size, stores[storage], n) for n in size.threads}
        notes[storage] = {"store_gb": round(num_bytes / 1e9, 2), "loader_alone_by_threads": alone}
        print(f"loader alone, {storage}, by threads: {alone}", flush=True)

    results = []
    for k in arguments.ttt_steps:
        loop = BareLoop(
            verifier, k, arguments.step, device=size.device, seq_len=size.seq_len, document=size.document
        )
        before = bare_speed(loop, size)
        print(f"bare loop, K={k}: {before:,.0f} tok/s", flush=True)
        for storage, store in stores.items():
            out = work / f"run-k{k}-{storage}"
            summary = train(size, verifier, store, out, k, arguments.updates, arguments.step)
            again = bare_speed(loop, size)
            bare, speed = max(before, again), summary["tokens_per_second"]
            results.append(
                {
                    "storage": storage,
                    "ttt_steps": k,
                    "bare_tok_s": round(bare),
                    "train_tok_s": round(speed),
                    "ratio": round(speed / bare, 4),
                    "data_wait_share": round(summary["data_wait_share"], 4),
                    "mfu": round(summary["needed_tflops_per_device"] * 1e12 / ceiling, 4),
                }
            )
            kept = ("read_gb_per_second", "peak_memory_gib", "first_update_seconds", "limit", "mfu")
            run = {name: summary[name] for name in kept} | {"bare_before": before, "bare_after": again}
            notes[f"k{k}_{storage}"] = run
            print(results[-1], flush=True)
            write_results(
                arguments.out, results, notes=notes
            )  # what was measured stays when a later one fails


if __name__ == "__main__":
    main()
