"""`python -m eagle3lab compare A B [C ...]`: which draft is accepted more, over the same prompts."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.config.errors import Problem, UserError

if TYPE_CHECKING:
    from eagle3lab.evaluate.comparable import Aligned
    from eagle3lab.evaluate.comparison import Comparison, Variant
    from eagle3lab.experiments.run_config import RunConfig

DESCRIPTION = (
    "Compare drafts by the acceptance that evaluate.py measured over the same prompts. Runs that differ in "
    "seeds alone are one variant; every variant is held against the first."
)
CSV, PLOT = "comparison.csv", "comparison.png"
SEED = 0


def main(argv: Sequence[str]) -> int:
    """Compare and print; returns 0, also where no difference is shown.

    Raises UserError where the evaluations cannot be compared.
    """
    arguments = _parser().parse_args(list(argv))
    from rich.console import Console

    from eagle3lab.evaluate.comparable import Only, align, notes
    from eagle3lab.evaluate.comparison import Comparison, compare_settings, method
    from eagle3lab.evaluate.comparison_report import print_comparison, to_json
    from eagle3lab.evaluate.evaluation_file import evaluations_of
    from eagle3lab.evaluate.paired import RESAMPLES

    names = _names(arguments.drafts)
    given = {name: evaluations_of(place) for name, place in names.items()}
    only = Only(arguments.prompts, arguments.k, arguments.temperature, arguments.backend)
    aligned = align(given, only, common_prompts=arguments.common_prompts)
    configs = _configs(aligned[0])
    variants, groups = _variants(list(names), configs, arguments)
    sections = compare_settings(aligned, groups, seed=SEED, resamples=RESAMPLES)
    comparison = Comparison(
        variants=tuple(variants),
        sections=tuple(sections),
        differing=_differing([configs[group[0]] for group in groups]),
        notes=(*notes(aligned, list(names)), *_unknown(variants, groups, configs)),
        method=tuple(method(variants, sections, SEED, RESAMPLES)),
    )
    if arguments.out:
        _write(comparison, arguments.out)
    if arguments.json:
        print(to_json(comparison))
    else:
        print_comparison(comparison, Console(width=None if sys.stdout.isatty() else 140))
        if arguments.out:
            print(f"figures {arguments.out / CSV}, plot {arguments.out / PLOT}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m eagle3lab compare", description=DESCRIPTION)
    parser.add_argument(
        "drafts",
        metavar="RUN",
        nargs="+",
        help="a run, draft or evaluation directory, or an evaluation.json; the first is the baseline",
    )
    for name, kind, what in (
        ("--prompts", str, "only this set of prompts; like the next three, as often as wanted"),
        ("--k", int, "only this number of drafted tokens per step"),
        ("--temperature", float, "only this temperature"),
        ("--backend", str, "only this back end"),
    ):
        parser.add_argument(name, type=kind, action="append", default=[], help=what)
    parser.add_argument(
        "--common-prompts", action="store_true", help="leave out, and count, prompts that not all decoded"
    )
    parser.add_argument("--no-group", action="store_true", help="every run is a variant of its own")
    parser.add_argument(
        "--ignore",
        metavar="KEY",
        action="append",
        default=[],
        help="a configuration key that makes no other variant, as git.commit or hardware; as often as wanted",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help=f"write {CSV} and {PLOT}")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _names(drafts: Sequence[str]) -> dict[str, Path]:
    """What the user named -> where it is; a thing named twice is a mistake."""
    if len(drafts) < 2:
        raise UserError(Problem("nothing to compare with", drafts[0], "two or more", "compare A B"))
    places: dict[Path, str] = {}
    for name in drafts:
        place = Path(name).resolve()
        if place in places:
            raise UserError(Problem("the same draft is named twice", f"{places[place]} and {name}"))
        places[place] = name
    return {name: place for place, name in places.items()}


def _configs(aligned: Aligned) -> list[RunConfig | None]:
    """The configuration of the run behind each evaluation: beside its draft."""
    from eagle3lab.experiments.run_config import read_run_config

    configs = []
    for m in aligned.measurements:
        draft = Path(m.draft)
        if not draft.is_dir():  # moved as a whole: the draft still lies beside its evaluation
            draft = m.source.parent.parent / draft.name
        configs.append(read_run_config(draft.parent) if draft.is_dir() else None)
    return configs


def _variants(
    names: Sequence[str], configs: Sequence[RunConfig | None], arguments: argparse.Namespace
) -> tuple[list[Variant], list[tuple[int, ...]]]:
    from eagle3lab.evaluate.comparison import Variant, label
    from eagle3lab.experiments.run_config import group_by_configuration, repeated_seeds

    alone: list[tuple[int, ...]] = [(i,) for i in range(len(names))]
    groups = alone if arguments.no_group else group_by_configuration(configs, arguments.ignore)
    for group in groups:
        if twice := repeated_seeds([configs[i] for i in group]):
            pair = " and ".join(names[group[i]] for i in twice)
            fix = "name one of them, or --no-group to hold them against each other"
            raise UserError(
                Problem("two runs of the same configuration and the same seed", pair, "other seeds", fix)
            )
    if len(groups) == 1:
        raise UserError(
            Problem(
                "nothing to compare: all runs differ in their seeds alone",
                ", ".join(names),
                "two variants or more",
                "--no-group to hold one seed against another",
            )
        )
    variants = []
    for i, group in enumerate(groups):
        known = [config for j in group if (config := configs[j])]
        changing = (
            [key for key in known[0].seeds if len({c.seeds.get(key) for c in known}) > 1] if known else []
        )
        seeds = tuple(
            ", ".join(f"{key}={c.seeds.get(key)}" for key in changing or ["train.seed"]) for c in known
        )
        variants.append(Variant(label(i), tuple(names[j] for j in group), seeds))
    return variants, groups


def _differing(configs: Sequence[RunConfig | None]) -> dict[str, list[Any]]:
    """Nested key -> its value in every variant."""
    from eagle3lab.experiments.run_config import ABSENT, differing_keys

    return {
        key: [config.values.get(key, ABSENT) if config else "?" for config in configs]
        for key in differing_keys(configs)
    }


def _unknown(
    variants: Sequence[Variant], groups: Sequence[Sequence[int]], configs: Sequence[RunConfig | None]
) -> list[str]:
    without = [v.label for v, group in zip(variants, groups, strict=True) if configs[group[0]] is None]
    return [f"no config.yaml beside the draft of {', '.join(without)}: how it was trained is unknown"] * bool(
        without
    )


def _write(comparison: Comparison, out: Path) -> None:
    from eagle3lab.evaluate.comparison import ALL
    from eagle3lab.evaluate.comparison_report import write_csv
    from eagle3lab.experiments.plots import plot_intervals

    out.mkdir(parents=True, exist_ok=True)
    write_csv(comparison, out / CSV)
    panels = {}
    for section in comparison.sections:
        compared = section.scopes[ALL]
        best = [(comparison.variants[i].label, i) for i in comparison.order]
        lengths = [(name, e) for name, i in best if (e := compared.lengths[i])]
        changes = [(name, d) for name, i in best if (d := compared.differences[i])]
        panels[str(section.setting)] = [
            [(name, e.length, e.low, e.high) for name, e in lengths],
            [(name, d.estimate, d.low, d.high) for name, d in changes],
        ]
    baseline = comparison.variants[0].label
    plot_intervals(
        panels,
        out / PLOT,
        columns=[("acceptance length, 95 %", None), (f"difference from {baseline}, paired, 95 %", 0.0)],
        legend=[v.describe() for v in comparison.variants],
    )
