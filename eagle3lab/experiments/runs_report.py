"""A comparison of runs for people and for other programs: terminal, CSV, JSON, PNG, HTML."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from eagle3lab.config.selection import FIGURES, SelectBy
from eagle3lab.config.value_text import as_typed

from .compare_runs import RunComparison, RunVariant
from .comparison_files import write_comparison
from .html_page import Block, HtmlTable, figure_cell
from .run_results import SPEED
from .runs_plot import plot_runs
from .seed_intervals import SeedMean

FORMAT, FORMAT_VERSION = "eagle3lab-run-comparison", 1
MAX_ON_TERMINAL = 8  # variants of which the configuration is printed
_COLUMNS = ("variant", "runs", "95 %", "difference", "95 % ", "val loss", "tokens/s", "peak GiB", "data wait",
            "limited by")  # fmt: skip


def print_runs(comparison: RunComparison, console: Console) -> None:
    """Variants best first, every run that did not finish, what differs, and how it was found."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    say(headline(comparison))
    columns, rows = variant_rows(comparison)
    table = Table(box=box.SIMPLE, padding=0)
    for i, column in enumerate(columns):
        width = max(len(text) for text in (*column.split(), *(row[i] for row in rows)))
        heading = textwrap.fill(column, width)  # headings fold, cells only where there is no room
        table.add_column(heading, justify="right" if i else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for run in comparison.not_finished:
        say(f"{run.state:<10} {run.name}: {run.reason}")
    keys = list(comparison.variants[0].settings)
    if keys and len(comparison.variants) <= MAX_ON_TERMINAL:
        say("what differs in the resolved configurations, best first:")
        table = Table(box=box.SIMPLE, padding=0)
        for column in ("key", *(v.label for v in comparison.variants)):
            table.add_column(column, overflow="fold")
        for key in keys:
            table.add_row(key, *(as_typed(v.settings[key]) for v in comparison.variants))
        console.print(table)
    for line in (*(f"NOTE: {note}" for note in comparison.notes), *comparison.method):
        say(line)


def headline(comparison: RunComparison) -> str:
    """How many runs, and how many of them finished: none is left out."""
    states, num = [run.state for run in comparison.runs], len(comparison.variants)
    counts = ", ".join(f"{states.count(s)} {s}" for s in dict.fromkeys(("finished", *sorted(states))))
    return f"{len(states)} runs ({counts}), {num} variant{'s' if num > 1 else ''}, by {comparison.criterion.name}"


def variant_rows(comparison: RunComparison) -> tuple[list[str], list[list[str]]]:
    """The table of variants as texts: columns and rows, best first; columns that nobody has are left out."""
    columns = list(_COLUMNS)
    columns.insert(2, comparison.criterion.name)
    columns[columns.index("difference")] = f"against {comparison.baseline}"
    rows = []
    for v in comparison.variants:
        finished = v.finished
        runs = f"{len(finished)}" if len(finished) == len(v.runs) else f"{len(finished)} of {len(v.runs)}"
        wait = v.means.get("data_wait_share")
        value = "-" if v.value is None else f"{v.value.mean:.4f}"
        states = sorted({run.state for run in v.runs})
        rows.append(
            [
                v.label,
                runs,
                value if finished else ", ".join(states),
                _interval(v.value),
                f"{v.change.mean:+.4f}" if v.change else "-",
                _interval(v.change, "+"),
                _number(v, "val/loss", ".4f"),
                _number(v, "tokens_per_second", ",.0f"),
                _number(v, "peak_memory_gib", ".2f"),
                "-" if wait is None else f"{wait:.1%}",
                "/".join(sorted({run.limited_by for run in finished if run.limited_by})) or "-",
            ]
        )
    kept = [i for i in range(len(columns)) if i < 3 or any(row[i] != "-" for row in rows)]
    return [columns[i] for i in kept], [[row[i] for i in kept] for row in rows]


def run_rows(comparison: RunComparison) -> Iterator[dict[str, Any]]:
    """One row per run, in the order named; a run that did not finish has no figures."""
    by_run = {run.place: v for v in comparison.variants for run in v.runs}
    figures = dict.fromkeys([FIGURES[by] for by in SelectBy])
    seeds = dict.fromkeys(key for run in comparison.runs if run.config for key in run.config.seeds)
    for run in comparison.runs:
        variant = by_run[run.place]
        yield {
            "run": run.name,
            "variant": variant.label,
            "state": run.state,
            "reason": run.reason,
            "criterion": comparison.criterion.name,
            "value": comparison.criterion.value(run),
            **{key: run.validation.get(key) for key in figures},
            **{key: run.figures.get(key) for key in SPEED},
            "limited_by": run.limited_by,
            **{key: run.config.seeds.get(key) if run.config else None for key in seeds},
            **variant.settings,
            "run_dir": str(run.place),
        }


def runs_json(comparison: RunComparison) -> str:
    """The same as one JSON object."""
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "criterion": comparison.criterion.name,
        "baseline": comparison.baseline,
        "variants": [
            {
                "variant": v.label,
                "runs": [run.name for run in v.runs],
                "num_finished": len(v.finished),
                "value": v.value and vars(v.value),
                "difference": v.change and vars(v.change),
                "means": v.means,
                "settings": v.settings,
            }
            for v in comparison.variants
        ],
        "rows": list(run_rows(comparison)),
        "notes": comparison.notes,
        "method": comparison.method,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def write_runs(comparison: RunComparison, *, out: Path | None, html: Path | None = None) -> list[Path]:
    """CSV and plot into `out`, the page where `html` says; what is None is not written. Returns what was."""
    return write_comparison(
        "Runs compared",
        list(run_rows(comparison)),
        partial(plot_runs, comparison),
        partial(_blocks, comparison),
        out=out,
        html=html,
    )


def _blocks(comparison: RunComparison, plot: Path) -> list[Block]:
    columns, rows = variant_rows(comparison)
    blocks: list[Block] = [headline(comparison), HtmlTable(columns, rows), plot]
    if comparison.not_finished:
        failed = [[run.name, run.state, run.reason] for run in comparison.not_finished]
        blocks.append(HtmlTable(["not finished", "state", "why"], failed))
    if keys := list(comparison.variants[0].settings):
        settings = [[v.label, *(as_typed(v.settings[key]) for key in keys)] for v in comparison.variants]
        blocks += ["What differs in the resolved configurations:", HtmlTable(["variant", *keys], settings)]
    found = list(run_rows(comparison))
    cells = [[(as_typed if key in keys else figure_cell)(x) for key, x in row.items()] for row in found]
    blocks += ["Every run:", HtmlTable(list(found[0]), cells)]
    return [*blocks, *(f"NOTE: {note}" for note in comparison.notes), *comparison.method]


def _interval(mean: SeedMean | None, sign: str = "") -> str:
    if mean is None or mean.low is None or mean.high is None:
        return "-"
    return f"{mean.low:{sign}.4f} {mean.high:{sign}.4f}"


def _number(variant: RunVariant, key: str, form: str) -> str:
    value = variant.means.get(key)
    return "-" if value is None else format(value, form)
