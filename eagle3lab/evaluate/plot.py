"""The plot beside the numbers: acceptance by position, acceptance lengths, speed by batch size."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eagle3lab.evaluate.progress import label
from eagle3lab.evaluate.results import Evaluation, VariantResult

PLOT_FILE = "acceptance.png"
COLOURS = {"trained": "#1f6f8b", "untrained": "#b0a8a0"}


def plot_acceptance(evaluation: Evaluation, directory: Path) -> Path:
    """`directory/acceptance.png`: acceptance per position, and acceptance length with its interval.

    With several batch sizes also the speed ratio by batch size.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    speeds = len(evaluation.setup["batch_sizes"]) > 1
    figure = Figure(figsize=(13 if speeds else 9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    positions, lengths, *more = figure.subplots(1, 3 if speeds else 2)
    _plot_positions(positions, evaluation.variants)
    _plot_lengths(lengths, evaluation)
    if more:
        _plot_speeds(more[0], evaluation.variants)
    prompts = evaluation.setup["prompts"]
    figure.suptitle(
        f"{evaluation.setup['verifier']['name']}, {prompts['num_decoded']} prompts of {prompts['name']}, "
        f"{evaluation.setup['backend']}"
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PLOT_FILE
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)
    return path


def _plot_positions(axes: Any, variants: tuple[VariantResult, ...]) -> None:
    deepest = max(v.k for v in variants)
    coolest = min(v.temperature for v in variants)
    for v in variants:
        if v.k != deepest:
            continue
        for style, values, what in (
            ("-o", v.overall.unconditional_acceptance, "0..j right"),
            (":o", v.overall.conditional_acceptance, "j right, given 0..j-1"),
        ):
            y = [float("nan") if p is None else p for p in values]
            name = label(v.variant, None, v.temperature)
            axes.plot(
                range(v.k),
                y,
                style,
                color=COLOURS.get(v.variant),
                alpha=1.0 if v.temperature == coolest else 0.45,
                label=f"{name}: {what}",
                markersize=4,
            )
    axes.set(xlabel="drafted position j", ylabel="share of steps", ylim=(-0.02, 1), xticks=range(deepest))
    axes.legend(fontsize=7)


def _plot_lengths(axes: Any, evaluation: Evaluation) -> None:
    for i, v in enumerate(evaluation.variants):
        s = v.overall
        if s.acceptance_length is None or s.acceptance_length_low is None or s.acceptance_length_high is None:
            continue
        low, high = (
            s.acceptance_length - s.acceptance_length_low,
            s.acceptance_length_high - s.acceptance_length,
        )
        error = [[max(low, 0.0)], [max(high, 0.0)]]
        axes.bar(i, s.acceptance_length, yerr=error, color=COLOURS.get(v.variant), capsize=4)
        axes.text(i, 0.05, f"{s.acceptance_length:.2f}", ha="center", color="white")
    axes.axhline(1, color="black", linewidth=0.8)
    simulated = evaluation.setup["simulated"]
    if simulated:
        text = f"simulated, {simulated['ttt_steps']} steps deep"
        axes.axhline(simulated["acceptance_length"], color="#c2572b", linestyle="--", linewidth=1, label=text)
        axes.legend(fontsize=7)
    axes.set(ylabel="acceptance length (with bonus token)")
    names = [label(v.variant, v.k, v.temperature).replace(" ", "\n") for v in evaluation.variants]
    axes.set_xticks(range(len(names)), names, fontsize=8)


def _plot_speeds(axes: Any, variants: tuple[VariantResult, ...]) -> None:
    for v in variants:
        known = [(x.batch_size, x.speed_ratio) for x in v.speeds if x.speed_ratio is not None]
        axes.plot(
            [size for size, _ in known],
            [ratio for _, ratio in known],
            "-o",
            markersize=4,
            label=label(v.variant, v.k, v.temperature),
        )
    axes.axhline(1, color="black", linewidth=0.8)
    sizes = sorted({x.batch_size for v in variants for x in v.speeds})
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set(xlabel="texts decoded together", ylabel="tokens/s, with the draft over without")
    axes.legend(fontsize=7)
