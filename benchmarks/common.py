"""What every benchmark shares: the form of a results file, and the ceiling it measures against."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3lab.experiments.provenance import git_state, package_versions

ROOT = Path(__file__).resolve().parent.parent


def hardware_name() -> str:
    """The GPUs, else the processor."""
    if torch.cuda.is_available():
        return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    return f"{os.cpu_count()} x {platform.machine()} CPU"


def commit_text(git: Mapping[str, Any]) -> str | None:
    """The commit of a `git_state`; one that is not all of the code that ran says so."""
    return f"{git['commit']} and uncommitted changes" if git["dirty"] else git["commit"]


def write_results(
    target: Path, rows: Sequence[dict[str, Any]], *, notes: dict[str, Any] | None = None
) -> None:
    """Write `{command, commit, date, hardware, versions, rows}`.

    EAGLE3LAB_COMMIT names the commit of a copy that git knows nothing about, and is believed.
    """
    words = [str(Path(sys.argv[0]).resolve().relative_to(ROOT)), *sys.argv[1:]]
    for option in ("--out", "--work"):  # where files lay on that machine says nothing
        if option in words:
            del words[words.index(option) : words.index(option) + 2]
    content = {
        "command": " ".join(["python", *words]),
        "commit": os.environ.get("EAGLE3LAB_COMMIT") or commit_text(git_state(ROOT)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "hardware": hardware_name(),
        "versions": {"python": platform.python_version(), **package_versions(), "torch": torch.__version__},
        **({"notes": notes} if notes else {}),
        "rows": list(rows),
    }
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(content, indent=2) + "\n")
    print(f"wrote {target}")


def matmul_ceiling(size: int = 8192, repeats: int = 20) -> float:
    """FLOP/s of a bf16 matrix product of random data on this device: what MFU is a share of."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        a @ b
    torch.cuda.synchronize()
    return 2 * size**3 * repeats / (time.perf_counter() - start)
