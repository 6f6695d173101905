"""The picture of a comparison of runs: the criterion with its interval, and its course over tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lab.config.names import METRICS
from eagle3lab.config.selection import FIGURES

from .compare_runs import RunComparison
from .plots import read_metrics, save_figure


def plot_runs(comparison: RunComparison, target: Path) -> None:
    """Write `target` (PNG): variants best first with every run as a dot, and each run's validations."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shown = [v for v in comparison.variants if v.value]
    figure = Figure(figsize=(12, max(3.6, 1.6 + 0.4 * len(shown))), layout="constrained")
    FigureCanvasAgg(figure)
    figures, courses = figure.subplots(1, 2)
    colours = matplotlib.colormaps["viridis"]
    name = FIGURES[comparison.criterion.by]
    for y, variant in enumerate(shown):
        colour = colours(0.9 * y / max(1, len(shown) - 1))
        value = variant.value
        assert value is not None
        if value.low is not None:
            figures.plot([value.low, value.high], [y, y], color=colour, linewidth=2)
        found = [v for run in variant.finished if (v := comparison.criterion.value(run)) is not None]
        figures.plot(found, [y] * len(found), "o", color=colour, alpha=0.5, markersize=4)
        figures.plot(value.mean, y, "D", color=colour, markersize=6)
        for i, run in enumerate(variant.finished):
            _plot_course(courses, run.place / METRICS, name, colour, variant.label if i == 0 else None)
    figures.set_yticks(range(len(shown)), [v.label for v in shown], fontsize=8)
    figures.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    figures.set_xlabel(comparison.criterion.name)
    courses.set(xlabel="training tokens", ylabel=name)
    for axis in (figures, courses):
        axis.grid(alpha=0.3)
    if courses.get_lines() and len(shown) <= 12:
        courses.legend(fontsize=7)
    hidden = len(comparison.not_finished)
    figure.suptitle(f"{len(comparison.runs)} runs" + (f", {hidden} of them not finished" if hidden else ""))
    save_figure(figure, target)


def _plot_course(axis: Any, metrics: Path, name: str, colour: Any, label: str | None) -> None:
    if not metrics.is_file():
        return
    series = read_metrics(metrics)
    tokens = dict(series.get("tokens", []))
    points = [(tokens[update], value) for update, value in series.get(name, []) if update in tokens]
    if points:
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, color=colour, label=label)
