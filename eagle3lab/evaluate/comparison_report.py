"""A comparison for people and for other programs: tables on the terminal, JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich import box
from rich.console import Console
from rich.table import Table

from eagle3lab.config.value_text import as_typed
from eagle3lab.evaluate.comparison import (
    ALL,
    Comparison,
    Section,
    Variant,
    best_first,
    rows,
    verdicts,
)
from eagle3lab.evaluate.paired import Difference, Estimate

FORMAT = "eagle3lab-comparison"
FORMAT_VERSION = 1


def print_comparison(comparison: Comparison, console: Console) -> None:
    """Variants, tables, verdicts, what differs, and how it was found."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    variants = comparison.variants
    for v in variants:
        say(v.describe())
    for section in comparison.sections:
        console.print(section_table(variants, section))
        if categories := category_table(variants, section):
            console.print(categories)
        for sentence in verdicts(variants, section):
            say(sentence)
    if comparison.differing:
        say("\nwhat differs in the resolved configurations, best first:")
        console.print(differences_table(comparison))
    for line in (*(f"NOTE: {note}" for note in comparison.notes), *comparison.method):
        say(line)


def to_json(comparison: Comparison) -> str:
    """The same as one JSON object."""
    variants, sections = comparison.variants, comparison.sections
    labels = [v.label for v in variants]
    content = {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "variants": [asdict(v) for v in variants],
        "best_first": [labels[i] for i in comparison.order],
        "verdicts": {str(s.setting): verdicts(variants, s) for s in sections},
        "differing": {k: dict(zip(labels, row, strict=True)) for k, row in comparison.differing.items()},
        "rows": list(rows(variants, sections)),
        "notes": comparison.notes,
        "method": comparison.method,
    }
    return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False, default=str)


def section_table(variants: Sequence[Variant], section: Section) -> Table:
    """Acceptance lengths best first, and each one's difference from the baseline."""
    compared = section.scopes[ALL]
    table = Table(box=box.SIMPLE, padding=0, title=f"{section.setting}: {compared.num_prompts} prompts")
    table.add_column("variant", overflow="fold")
    for name in (
        "runs",
        "length",
        "95 %",
        f"against {variants[0].label}",
        "95 %",
        "p" if len(variants) == 2 else "p (Holm)",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for i in best_first(variants, [section]):
        length, difference = compared.lengths[i], compared.differences[i]
        table.add_row(
            variants[i].title,
            str(variants[i].num_runs),
            f"{length.length:.3f}" if length else "-",
            f"{length.low:.3f}-{length.high:.3f}" if length else "-",
            *_cells(difference),
        )
    return table


def category_table(variants: Sequence[Variant], section: Section) -> Table | None:
    """Differences from the baseline in every category; None where there is only one."""
    if len(section.scopes) == 1:
        return None
    table = Table(box=box.SIMPLE, padding=0, title=f"{section.setting}: by category, * where shown")
    table.add_column("category", no_wrap=True)
    table.add_column("prompts", justify="right")
    table.add_column(variants[0].label, justify="right", no_wrap=True)
    for v in variants[1:]:
        table.add_column(f"{v.label} - {variants[0].label}", justify="right")
    for scope, compared in section.scopes.items():
        if scope != ALL:
            cells = [_difference(d) for d in compared.differences[1:]]
            table.add_row(scope, str(compared.num_prompts), _length(compared.lengths[0]), *cells)
    return table


def differences_table(comparison: Comparison) -> Table:
    """What differs in the resolved configurations: one row per nested key, variants best first."""
    table = Table(box=box.SIMPLE, padding=0)
    table.add_column("key", no_wrap=True)
    for i in comparison.order:
        table.add_column(comparison.variants[i].label, overflow="fold")
    for key, values in comparison.differing.items():
        table.add_row(key, *(as_typed(values[i]) for i in comparison.order))
    return table


def _cells(d: Difference | None) -> tuple[str, str, str]:
    if d is None:
        return "", "", ""
    return f"{d.estimate:+.3f}", f"{d.low:+.3f} {d.high:+.3f}", f"{d.p_holm:.4f}"


def _difference(d: Difference | None) -> str:
    if d is None:
        return "-"
    return f"{d.estimate:+.2f} [{d.low:+.2f}, {d.high:+.2f}]{'*' if d.shown else ' '}"


def _length(estimate: Estimate | None) -> str:
    return f"{estimate.length:.2f}" if estimate else "-"
