"""The files of a comparison of evaluations: CSV, PNG and a page of its own."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from eagle3lab.config.value_text import as_typed
from eagle3lab.evaluate.comparison import ALL, Comparison, rows, verdicts
from eagle3lab.experiments.comparison_files import write_comparison
from eagle3lab.experiments.html_page import Block, HtmlTable, figure_cell
from eagle3lab.experiments.plots import plot_intervals


def write_files(comparison: Comparison, out: Path | None, html: Path | None) -> list[Path]:
    """CSV and plot into `out`, the page where `html` says; what is None is not written. Returns what was."""
    return write_comparison(
        "Drafts compared",
        list(rows(comparison.variants, comparison.sections)),
        partial(_plot, comparison),
        partial(_blocks, comparison),
        out=out,
        html=html,
    )


def _blocks(comparison: Comparison, plot: Path) -> list[Block]:
    variants = comparison.variants
    blocks: list[Block] = [v.describe() for v in variants]
    blocks += [f"{s.setting}: {line}" for s in comparison.sections for line in verdicts(variants, s)]
    blocks.append(plot)
    if comparison.differing:
        best = comparison.order
        texts = [[key, *(as_typed(values[i]) for i in best)] for key, values in comparison.differing.items()]
        blocks.append("What differs in the resolved configurations, best first:")
        blocks.append(HtmlTable(["key", *(variants[i].label for i in best)], texts))
    found = list(rows(variants, comparison.sections))
    blocks.append(HtmlTable(list(found[0]), [[figure_cell(x) for x in row.values()] for row in found]))
    return [*blocks, *(f"NOTE: {note}" for note in comparison.notes), *comparison.method]


def _plot(comparison: Comparison, target: Path) -> None:
    panels = {}
    for section in comparison.sections:
        compared = section.scopes[ALL]
        best = [(comparison.variants[i].title, i) for i in comparison.order]
        lengths = [(name, e) for name, i in best if (e := compared.lengths[i])]
        changes = [(name, d) for name, i in best if (d := compared.differences[i])]
        panels[str(section.setting)] = [
            [(name, e.length, e.low, e.high) for name, e in lengths],
            [(name, d.estimate, d.low, d.high) for name, d in changes],
        ]
    baseline = comparison.variants[0].label
    plot_intervals(
        panels,
        target,
        columns=[("acceptance length, 95 %", None), (f"difference from {baseline}, paired, 95 %", 0.0)],
        legend=[v.describe() for v in comparison.variants if not v.choices],
    )
