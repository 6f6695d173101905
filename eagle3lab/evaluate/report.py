"""An evaluation for people: the table on the terminal and the plot beside the numbers."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.table import Table

from eagle3lab.evaluate.results import Evaluation, VariantResult

PLOT_FILE = "acceptance.png"
COLOURS = {"trained": "#1f6f8b", "untrained": "#b0a8a0"}


def results_table(evaluation: Evaluation) -> Table:
    """One row per draft and k, one column per figure; `length` is the acceptance length."""
    prompts = evaluation.setup["prompts"]
    table = Table(
        box=box.SIMPLE,
        padding=0,
        title=f"{evaluation.setup['verifier']['name']}, {prompts['num_decoded']} prompts of {prompts['name']}, "
        f"greedy, {evaluation.setup['precision']} on {evaluation.setup['device']}",
        caption="length: tokens per verification step, with the bonus token, pooled over prompts;\n"
        "by position: share of all steps in which drafted token j was accepted",
    )
    table.add_column("draft", no_wrap=True)
    for name in ("k", "length", "95 %", "by position", "tok/s", "x plain", "same text"):
        table.add_column(name, justify="right", no_wrap=name != "by position")
    for v in evaluation.variants:
        s = v.overall
        table.add_row(
            v.variant,
            str(v.k),
            _number(s.acceptance_length, 2),
            f"{_number(s.acceptance_length_low, 2)}-{_number(s.acceptance_length_high, 2)}",
            " ".join(_number(p, 2) for p in s.unconditional_acceptance),
            _number(v.draft_tokens_per_second, 1),
            _number(v.speed_ratio, 2),
            _identical(v),
        )
    if evaluation.variants:
        plain = evaluation.variants[0].plain_tokens_per_second
        table.add_row("(none)", "0", "1.00", "", "", _number(plain, 1), "1.00", "")
    return table


def category_table(evaluation: Evaluation, k: int | None = None) -> Table:
    """Acceptance length of every category of prompts, one column per draft."""
    variants = [v for v in evaluation.variants if k is None or v.k == k]
    table = Table(box=box.SIMPLE, title="acceptance length by category")
    table.add_column("category")
    table.add_column("prompts", justify="right")
    for v in variants:
        table.add_column(f"{v.variant} k={v.k}", justify="right")
    for name in variants[0].per_category if variants else ():
        stats = [v.per_category[name] for v in variants]
        table.add_row(name, str(stats[0].num_prompts), *(_number(s.acceptance_length, 2) for s in stats))
    return table


def plot_acceptance(evaluation: Evaluation, directory: Path) -> Path:
    """`directory/acceptance.png`: acceptance per position, and acceptance length with its interval."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    positions, lengths = figure.subplots(1, 2)
    deepest = max(v.k for v in evaluation.variants)
    for v in evaluation.variants:
        colour = COLOURS.get(v.variant)
        if v.k == deepest:
            for style, values, what in (
                ("-o", v.overall.unconditional_acceptance, "0..j right"),
                (":o", v.overall.conditional_acceptance, "j right, given 0..j-1"),
            ):
                y = [float("nan") if p is None else p for p in values]
                positions.plot(range(v.k), y, style, color=colour, label=f"{v.variant}: {what}", markersize=4)
    positions.set(
        xlabel="drafted position j", ylabel="share of steps", ylim=(-0.02, 1), xticks=range(deepest)
    )
    positions.legend(fontsize=7)
    for i, v in enumerate(evaluation.variants):
        s = v.overall
        if s.acceptance_length is None or s.acceptance_length_low is None or s.acceptance_length_high is None:
            continue
        low, high = (
            s.acceptance_length - s.acceptance_length_low,
            s.acceptance_length_high - s.acceptance_length,
        )
        error = [[max(low, 0.0)], [max(high, 0.0)]]
        lengths.bar(i, s.acceptance_length, yerr=error, color=COLOURS.get(v.variant), capsize=4)
        lengths.text(i, 0.05, f"{s.acceptance_length:.2f}", ha="center", color="white")
    lengths.axhline(1, color="black", linewidth=0.8)
    lengths.set(ylabel="acceptance length (with bonus token)")
    lengths.set_xticks(
        range(len(evaluation.variants)), [f"{v.variant}\nk={v.k}" for v in evaluation.variants]
    )
    prompts = evaluation.setup["prompts"]
    figure.suptitle(
        f"{evaluation.setup['verifier']['name']}, {prompts['num_decoded']} prompts of {prompts['name']}"
    )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / PLOT_FILE
    temporary = path.with_suffix(".tmp.png")
    figure.savefig(temporary, dpi=130)
    temporary.replace(path)
    return path


def _identical(v: VariantResult) -> str:
    text = f"{v.num_identical}/{v.overall.num_prompts}"
    return text + (f" ({v.num_near_ties} near ties)" if v.num_near_ties else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
