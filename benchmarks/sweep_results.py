"""A finished sweep, wherever it ran -> a results file: its comparisons, under the command and provenance of its trials.

python benchmarks/sweep_results.py outputs/sweeps/noise/STAMP --out benchmarks/results/sweep_noise_h200.json

The figures are those of `python -m eagle3lab compare`: training's, and acceptance where every draft was decoded.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import ROOT, commit_text

from eagle3lab.evaluate.evaluation_file import FILE
from eagle3lab.experiments.run_results import runs_of


def compared(sweep: Path, *options: str) -> dict[str, Any]:
    """What `compare` says, as an object; paths from the sweep's own directory."""
    words = [sys.executable, "-m", "eagle3lab", "compare", ".", "--json", *options]
    environment = {"PYTHONPATH": str(ROOT), "PATH": ""}
    found = subprocess.run(words, cwd=sweep, env=environment, check=True, capture_output=True, text=True)
    content: dict[str, Any] = json.loads(found.stdout)
    return content


def provenance_of(runs: list[Path]) -> dict[str, Any]:
    """Commit, hardware and versions, which all runs must share."""
    kept = ("git", "hardware", "python", "versions")
    found = [json.loads((run / "provenance.json").read_text()) for run in runs]
    first = {key: found[0][key] for key in kept}
    assert all({key: one[key] for key in kept} == first for one in found), "trials of different provenance"
    return first


def was_decoded(run: Path) -> bool:
    return any(run.glob(f"evaluation*/{FILE}"))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    index = json.loads((arguments.sweep / "sweep.json").read_text())
    runs = runs_of(arguments.sweep)
    provenance = provenance_of(runs)
    git, gpus = provenance["git"], provenance["hardware"]["cuda"]
    words = ["store=STORE" if word.startswith("store=") else word for word in index["command"]]
    training = compared(arguments.sweep, "--training")
    notes = {key: training[key] for key in ("criterion", "baseline", "notes", "method") if key in training}
    content = {
        "command": " ".join(words),
        "commit": commit_text(git),
        "hardware": f"{len(gpus)} x {gpus[0]}" if gpus else provenance["hardware"]["cpu"],
        "versions": {"python": provenance["python"], **provenance["versions"]},
        "trials": [{key: trial[key] for key in ("run_dir", "state", "value")} for trial in index["trials"]],
        "training": notes,
        "rows": training["variants"],
    }
    if all(map(was_decoded, runs)):
        acceptance = compared(arguments.sweep)
        rows = [{k: v for k, v in row.items() if k != "runs"} for row in acceptance["rows"]]
        content["acceptance"] = {
            "variants": {v["label"]: v["choices"] for v in acceptance["variants"]},
            "verdicts": acceptance["verdicts"],
            "method": acceptance["method"],
            "rows": rows,
        }
    arguments.out.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    print(f"wrote {arguments.out}")


if __name__ == "__main__":
    main()
