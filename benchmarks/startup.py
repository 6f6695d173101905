"""How long the commands take to answer, and whether they import torch for it.

python benchmarks/startup.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from common import ROOT, write_results

COMMANDS = (
    ["train.py", "--help"],
    ["extract.py", "--help"],
    ["evaluate.py", "--help"],
    ["train.py", "noise=unifrom0.05"],
)
REPEATS = 5


def imports_torch(words: list[str]) -> bool:
    """Whether torch is in sys.modules when the command ends."""
    code = (
        f"import runpy, sys; sys.argv = {words!r}\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print('TORCH' if 'torch' in sys.modules else 'NONE')"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.rstrip().endswith("TORCH")


def main() -> None:
    rows = []
    for words in COMMANDS:
        seconds = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=False)
            seconds.append(time.perf_counter() - start)
        row = {
            "command": "python " + " ".join(words),
            "seconds": round(statistics.median(seconds), 3),
            "imports_torch": imports_torch(words),
        }
        print(row)
        rows.append(row)
    write_results(ROOT / "benchmarks/results/startup.json", rows)


if __name__ == "__main__":
    main()
