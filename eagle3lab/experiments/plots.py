"""Curves of a run as one PNG, from its metrics.csv."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from eagle3lab.store.files import write_atomically

ACCEPTANCE = tuple(
    f"val/{name}"
    for name in ("simulated_acceptance_length", "*/simulated_acceptance_length", "real_acceptance_length")
)
PANELS = (  # title, patterns of the figures, y label
    ("loss", ("train/loss", "val/loss"), "loss"),
    ("validation acceptance per step", ("val/acceptance_step*",), "P(steps 0..k right)"),
    ("acceptance length", ACCEPTANCE, "tokens per step"),
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
    for axis, (name, patterns, label) in zip(axes.flat, PANELS, strict=True):
        for figure_name in sorted(series):
            if any(fnmatchcase(figure_name, pattern) for pattern in patterns):
                points = series[figure_name]
                marker = "o" if len(points) < 30 else None
                axis.plot(*zip(*points, strict=True), marker=marker, markersize=3, label=figure_name)
        axis.set(title=name, xlabel="update", ylabel=label)
        axis.grid(alpha=0.3)
        if axis.get_lines():
            axis.legend(fontsize=8)
    figure.suptitle(title)
    save_figure(figure, target)
    plt.close(figure)


def plot_intervals(
    panels: Mapping[str, Sequence[Sequence[tuple[str, float, float, float]]]],
    target: Path,
    *,
    columns: Sequence[tuple[str, float | None]],
    legend: Sequence[str] = (),
) -> None:
    """Estimates with their intervals, the first on top, to `target` (PNG): a row of panels per title.

    Args:
        panels: title -> for every column its `(name, estimate, low, high)`.
        columns: x label and the value that a line marks.
        legend: lines below the panels, what the names stand for.
    """
    import textwrap

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    lines = [line for text in legend for line in textwrap.wrap(text, 120)]
    heights = [0.7 + 0.35 * max(map(len, row)) for row in panels.values()]
    size = (4.6 * len(columns), sum(heights) + 0.8 + 0.16 * len(lines))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), len(columns), squeeze=False, height_ratios=heights, sharex="col")
    for row_axes, (title, row) in zip(axes, panels.items(), strict=True):
        for axis, points, (_, marked) in zip(row_axes, row, columns, strict=True):
            if marked is not None:
                axis.axvline(marked, color="black", linewidth=0.8)
            for y, (_, estimate, low, high) in enumerate(points):
                axis.plot([low, high], [y, y], color="#1f6f8b", linewidth=2)
                axis.plot(estimate, y, "o", color="#1f6f8b")
                axis.annotate(
                    f"{estimate:.2f}", (estimate, y), (0, 5), textcoords="offset points", ha="center"
                )
            axis.set_yticks(range(len(points)), [name for name, *_ in points])
            axis.set_ylim(len(points) - 0.5, -0.6)
            axis.set_title(title, fontsize=9)
            axis.grid(axis="x", alpha=0.3)
    for axis, (xlabel, _) in zip(axes[-1], columns, strict=True):
        axis.set_xlabel(xlabel, fontsize=8)
    figure.supxlabel("\n".join(lines), fontsize=7)
    save_figure(figure, target)


def save_figure(figure: Any, target: Path) -> None:
    """At once or not at all; the same figure is the same bytes."""
    write_atomically(
        target,
        lambda temporary: figure.savefig(temporary, dpi=110, format="png", metadata={"Software": None}),
    )
