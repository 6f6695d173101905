"""Does simulated acceptance length tell what decoding accepts? Over drafts of different quality, from their run directories.

python benchmarks/simulated_against_real.py RUN... --out benchmarks/results/simulated_against_real.json

Simulated: teacher-forced over validation rows, the first k steps, of the exported weights. Real: k drafted tokens,
greedy, over the prompts that evaluate.py decoded. Drafts that were trained for fewer than k steps are left out.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from common import ROOT, write_results

from eagle3lab.experiments.plots import read_metrics


def pair(run: Path, k: int) -> dict[str, Any] | None:
    """Both lengths of one draft; None where it was not unrolled for k steps."""
    update = json.loads((run / "summary.json").read_text())["exported_update"]
    metrics = read_metrics(run / "metrics.csv")
    steps = [dict(metrics.get(f"val/acceptance_step{i}", [])).get(update) for i in range(k)]
    if any(step is None for step in steps):
        return None
    evaluation = json.loads((run / "evaluation/evaluation.json").read_text())
    variants = [v for v in evaluation["variants"] if v["k"] == k and v["temperature"] == 0]
    (real,) = (v["overall"] for v in variants if v["variant"] == "trained")
    return {
        "draft": run.name,
        "simulated": round(1 + sum(step for step in steps if step), 4),
        "real": round(real["acceptance_length"], 4),
        "low": round(real["acceptance_length_low"], 4),
        "high": round(real["acceptance_length_high"], 4),
    }


def ranks(values: list[float]) -> list[int]:
    """The place of each in their order."""
    return [sorted(values).index(value) for value in values]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/simulated_against_real.json")
    arguments = parser.parse_args()
    found = {run: pair(run, arguments.k) for run in arguments.runs}
    rows = [row for row in found.values() if row]
    simulated, real = [r["simulated"] for r in rows], [r["real"] for r in rows]
    biases = [r - s for s, r in zip(simulated, real, strict=True)]
    slope, intercept = statistics.linear_regression(simulated, real)
    notes = {
        "k": arguments.k,
        "drafts": len(rows),
        "left_out": [run.name for run, row in found.items() if not row],
        "pearson": round(statistics.correlation(simulated, real), 4),
        "spearman": round(statistics.correlation(ranks(simulated), ranks(real)), 4),
        "mean_bias": round(statistics.mean(biases), 4),
        "bias_range": [round(min(biases), 4), round(max(biases), 4)],
        "real_from_simulated": {"slope": round(slope, 4), "intercept": round(intercept, 4)},
    }
    for row in rows:
        print(f"{row['simulated']:.3f} {row['real']:.3f}  {row['draft']}")
    print(notes)
    write_results(arguments.out, rows, notes=notes)


if __name__ == "__main__":
    main()
