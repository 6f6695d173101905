"""Curves of a run as one PNG, from its metrics.csv."""

from __future__ import annotations

import csv
import math
from pathlib import Path

PANELS = (  # title, prefix of the figures, y label
    ("loss", ("train/loss", "val/loss"), "loss"),
    ("validation acceptance per step", ("val/acceptance_step",), "P(steps 0..k right)"),
    ("simulated acceptance length", ("val/simulated_acceptance_length",), "tokens per step"),
    ("speed", ("speed/tokens_per_second",), "tokens/s"),
)


def read_metrics(path: Path) -> dict[str, list[tuple[float, float]]]:
    """Points `(update, value)` of every figure in a metrics.csv; empty cells are no points."""
    series: dict[str, list[tuple[float, float]]] = {}
    with path.open(newline="", encoding="utf-8") as f:
        for row in csv.DictReader(f):
            for name, text in row.items():
                if name not in ("update", None) and text not in ("", None):
                    value = float(text)
                    if math.isfinite(value):
                        series.setdefault(name, []).append((float(row["update"]), value))
    return series


def plot_curves(metrics: Path, target: Path, title: str) -> None:
    """Write the curves of one run to `target` (PNG)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    series = read_metrics(metrics)
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    for axis, (name, prefixes, label) in zip(axes.flat, PANELS, strict=True):
        for figure_name in sorted(series):
            exact = figure_name in prefixes
            stepped = any(p.endswith("_step") and figure_name.startswith(p) for p in prefixes)
            if exact or stepped:
                points = series[figure_name]
                marker = "o" if len(points) < 30 else None
                axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=figure_name)
        axis.set(title=name, xlabel="update", ylabel=label)
        axis.grid(alpha=0.3)
        if axis.get_lines():
            axis.legend(fontsize=8)
    figure.suptitle(title)
    temporary = target.with_name(f".{target.name}")
    figure.savefig(temporary, dpi=110, format="png", metadata={"Software": None})
    plt.close(figure)
    temporary.replace(target)
