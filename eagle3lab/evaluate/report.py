"""An evaluation for people: tables on the terminal, and the same figures for a tracker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from eagle3lab.evaluate.progress import label
from eagle3lab.evaluate.results import Evaluation, VariantResult


def results_table(evaluation: Evaluation) -> Table:
    """One row per draft, k and temperature, one column per figure; `length` is the acceptance length."""
    setup = evaluation.setup
    prompts, sampled = setup["prompts"], any(setup["temperature"])
    drawn = f", sampled text drafted {setup['proposal']}" if sampled else ""
    table = Table(
        box=box.SIMPLE,
        padding=0,
        title=f"{setup['verifier']['name']}, {prompts['num_decoded']} prompts of {prompts['name']}, "
        f"{_temperatures(setup['temperature'])}{drawn}, {setup['precision']} on {setup['device']}, "
        f"{setup['backend']}",
        caption="\n".join(_notes(setup)),
    )
    table.add_column("draft", no_wrap=True)
    sizes = setup["batch_sizes"]
    names = ["k", *(["T"] if sampled else []), "length", "95 %", "by position"]
    for size in sizes:
        together = "" if sizes == [1] else f" b={size}"
        names += [f"tok/s{together}", f"x plain{together}"]
    for name in (*names, "same text"):
        table.add_column(name, justify="right", no_wrap=name != "by position")
    for v in evaluation.variants:
        s = v.overall
        table.add_row(
            v.variant,
            str(v.k),
            *([f"{v.temperature:g}"] if sampled else []),
            _number(s.acceptance_length, 2),
            f"{_number(s.acceptance_length_low, 2)}-{_number(s.acceptance_length_high, 2)}",
            " ".join(_number(p, 2) for p in s.unconditional_acceptance),
            *_speeds([(x.draft_tokens_per_second, x.speed_ratio) for x in v.speeds]),
            _identical(v),
        )
    for temperature in setup["temperature"]:
        alone = [p for p in evaluation.passes if p.way.k == 0 and p.way.temperature == temperature]
        table.add_row(
            "(none)",
            "0",
            *([f"{temperature:g}"] if sampled else []),
            "1.00",
            "",
            "",
            *_speeds([(p.tokens_per_second, 1.0) for p in alone]),
            "",
        )
    return table


def _notes(setup: dict[str, Any]) -> list[str]:
    notes = [
        "length: tokens per verification step, with the bonus token, pooled over prompts;",
        "by position: share of all steps in which drafted token j was accepted",
    ]
    if setup["batch_sizes"] != [1]:
        notes[-1] += ";"
        notes.append("b: texts decoded together; length, by position and same text are of the first")
    if setup.get("eager"):
        notes[-1] += ";"
        notes.append(
            "tok/s: without compilation and CUDA graphs (hardware.engine.eager): less than serving reaches"
        )
    if setup["simulated"]:
        notes[-1] += ";"
        notes.append(
            f"simulated in training: {setup['simulated']['acceptance_length']:.2f}, "
            f"{setup['simulated']['ttt_steps']} steps deep, teacher-forced over validation rows"
        )
    return notes


def figures(evaluation: Evaluation) -> tuple[list[str], list[list[Any]]]:
    """The table as names of columns and rows of plain values, for a tracker."""
    columns = [
        "variant", "k", "temperature", "batch_size", "acceptance_length", "low", "high", "simulated", "speed_ratio",
        "draft_tokens_per_second", "plain_tokens_per_second", "num_identical", "num_near_ties", "num_prompts",
    ]  # fmt: skip
    simulated = (evaluation.setup["simulated"] or {}).get("acceptance_length")
    rows: list[list[Any]] = []
    for v in evaluation.variants:
        s = v.overall
        rows += [
            [
                v.variant, v.k, v.temperature, x.batch_size, x.acceptance_length,
                s.acceptance_length_low if i == 0 else None, s.acceptance_length_high if i == 0 else None,
                simulated if v.variant == "trained" else None, x.speed_ratio, x.draft_tokens_per_second,
                x.plain_tokens_per_second, x.num_identical, x.num_near_ties, s.num_prompts,
            ]
            for i, x in enumerate(v.speeds)
        ]  # fmt: skip
    return columns, rows


def summary_figures(evaluation: Evaluation) -> dict[str, Any]:
    """The headline figures under names that say which they are."""
    found: dict[str, Any] = {}
    for v in evaluation.variants:
        name = f"{v.variant}/k{v.k}/T{v.temperature:g}"
        found[f"{name}/acceptance_length"] = v.overall.acceptance_length
        for j, p in enumerate(v.overall.unconditional_acceptance):
            found[f"{name}/unconditional_acceptance_{j}"] = p
        for x in v.speeds:
            found[f"{name}/speed_ratio_b{x.batch_size}"] = x.speed_ratio
    if evaluation.setup["simulated"]:
        found["simulated_acceptance_length"] = evaluation.setup["simulated"]["acceptance_length"]
    return found


def category_table(evaluation: Evaluation, k: int | None = None) -> Table:
    """Acceptance length of every category of prompts, one column per draft, k and temperature."""
    variants = [v for v in evaluation.variants if k is None or v.k == k]
    table = Table(box=box.SIMPLE, title="acceptance length by category")
    table.add_column("category")
    table.add_column("prompts", justify="right")
    for v in variants:
        table.add_column(label(v.variant, v.k, v.temperature), justify="right")
    for name in variants[0].per_category if variants else ():
        stats = [v.per_category[name] for v in variants]
        table.add_row(name, str(stats[0].num_prompts), *(_number(s.acceptance_length, 2) for s in stats))
    return table


def _temperatures(values: Sequence[float]) -> str:
    return " and ".join(f"T={t:g}" if t else "greedy" for t in values)


def _speeds(values: Sequence[tuple[float | None, float | None]]) -> list[str]:
    return [text for speed, ratio in values for text in (_number(speed, 1), _number(ratio, 2))]


def _identical(v: VariantResult) -> str:
    if v.num_identical is None:
        return ""
    text = f"{v.num_identical}/{v.overall.num_prompts}"
    return text + (f" ({v.num_near_ties} near ties)" if v.num_near_ties else "")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
