"""Where a training step of `train.py` makes the host wait for the GPU between two logging intervals: nowhere.

python benchmarks/hidden_syncs.py

CUDA's own debug mode warns of every operation that waits; the warnings are counted by the line that caused them.
Exits with 1 when there are any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from common import ROOT
from synthetic import LAYER_IDS, QWEN3_8B, make_rows, make_store, make_verifier

from eagle3lab.cli import main as run_command
from eagle3lab.training.interval_log import IntervalLog
from eagle3lab.training.module import Eagle3Module

SEQ_LEN, DOCUMENT, UPDATES, WATCHED_FROM = 8192, 1024, 40, 21  # by then everything is compiled


def watch(found: Counter[str], seen: list[int]) -> None:
    """Count waits from update WATCHED_FROM on, outside of logging."""
    step, log = Eagle3Module.training_step, IntervalLog.log_interval

    def count(message: Any, category: Any, filename: str, line: int, *_: Any) -> None:
        if "synchroniz" in str(message):
            found[f"{filename}:{line}"] += 1

    def watched_step(self: Eagle3Module, batch: Any, index: int) -> None:
        if self.num_updates >= WATCHED_FROM:
            warnings.simplefilter("always")
            warnings.showwarning = count
            seen.append(self.num_updates)
            torch.cuda.set_sync_debug_mode("warn")
        step(self, batch, index)

    def unwatched_log(self: IntervalLog, trainer: Any, module: Any) -> None:
        torch.cuda.set_sync_debug_mode("default")
        log(self, trainer, module)

    Eagle3Module.training_step, IntervalLog.log_interval = watched_step, unwatched_log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument("--step", default="pruned", choices=["pruned", "reference"])
    parser.add_argument("--noise", default="uniform0.05")
    arguments = parser.parse_args()
    arguments.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="syncs", dir=arguments.work))
    found: Counter[str] = Counter()
    seen: list[int] = []
    try:
        make_verifier(work / "verifier", QWEN3_8B, "cuda")
        rows = make_rows(24, DOCUMENT + 1, QWEN3_8B.vocab_size, 0.5)
        make_store(work / "store", work / "verifier", rows, "cuda", dtype="float8_e4m3")
        watch(found, seen)
        os.chdir(ROOT)
        sys.argv = [
            "train.py", "model=local", "model.name=synthetic", f"model.path={work / 'verifier'}", "data=jsonl",
            "data.paths=[none]", f"store={work / 'store'}", "hardware=h200", f"draft.step={arguments.step}",
            f"draft.aux_layer_ids=[{','.join(map(str, LAYER_IDS))}]", f"train.seq_len={SEQ_LEN}",
            "train.max_epochs=null", f"train.max_updates={UPDATES}", f"train.validate_every_updates={UPDATES}",
            f"noise={arguments.noise}", f"run_dir={work / 'run'}",
        ]  # fmt: skip
        run_command("train")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    for place, number in found.most_common():
        print(f"{number:5d} waits at {place}")
    print(f"{sum(found.values())} waits in {len(seen)} updates with draft.step={arguments.step}")
    sys.exit(1 if found or not seen else 0)


if __name__ == "__main__":
    main()
