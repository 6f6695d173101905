"""Seconds from the command to the end of the first update of `train.py`, with a cold and a warm compile cache.

python benchmarks/time_to_first_step.py --out benchmarks/results/first_step_h200.json
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import ROOT, write_results
from synthetic import QWEN3_8B, make_rows, make_store, make_verifier, train_words

from eagle3lab.config.schema import Shapes

# what a line of the run's output says has just ended
MARKS = {
    "start_report_s": re.compile(r"^run "),  # imports, the verifier's facts, the store's index, the plan
    "self_test_s": re.compile(r"^alignment self-test"),
    "first_update_s": re.compile(r"^update 1/"),
    "second_update_s": re.compile(r"^update 2/"),
    "third_update_s": re.compile(r"^update 3/"),
}


def run(command: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the process's start to each mark, and to its end."""
    start = time.perf_counter()
    seconds: dict[str, float] = {}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        for name, pattern in MARKS.items():
            if name not in seconds and pattern.match(line):
                seconds[name] = round(time.perf_counter() - start, 2)
        print(line, end="", flush=True)
    if process.wait():
        raise SystemExit(f"train.py ended with {process.returncode}")
    assert seconds.keys() == MARKS.keys(), seconds
    return seconds | {"end_s": round(time.perf_counter() - start, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/first_step_h200.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="on a CPU: does it run, not how fast")
    arguments = parser.parse_args()
    shapes, device, hardware, seq_len, document = QWEN3_8B, "cuda", "h200", 8192, 1024
    if arguments.tiny:
        shapes, device, hardware = Shapes(64, 96, 4, 4, 2, 16, 512, 200_000), "cpu", "cpu"
        seq_len, document = 256, 64

    arguments.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="first-step", dir=arguments.work))
    try:
        make_verifier(work / "verifier", shapes, device)
        rows = make_rows(3 * seq_len // document, document + 1, shapes.vocab_size, 0.5)
        make_store(work / "store", work / "verifier", rows, device)
        caches = {"TORCHINDUCTOR_CACHE_DIR": str(work / "cache"), "TRITON_CACHE_DIR": str(work / "triton")}
        results = []
        for cache in ("cold", "warm"):
            command = [
                sys.executable, "train.py",
                *train_words(work / "verifier", work / "store", seq_len=seq_len, ttt_steps=arguments.ttt_steps),
                f"hardware={hardware}", "train.max_updates=3", "train.log_every_updates=1", f"run_dir={work / cache}",
            ]  # fmt: skip
            seconds = run(command, {**os.environ, **caches, "PYTHONUNBUFFERED": "1"})
            results.append({"cache": cache, "ttt_steps": arguments.ttt_steps, **seconds})
            print(results[-1], flush=True)
        write_results(arguments.out, results)
    finally:
        shutil.rmtree(work, ignore_errors=True)


if __name__ == "__main__":
    main()
