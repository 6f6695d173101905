"""`python -m eagle3lab compare RUN...|SWEEP_DIR`: what differs between runs, and what it changed.

Drafts that were evaluated are compared by acceptance over the same prompts, others by what training measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.value_text import as_typed

if TYPE_CHECKING:
    from eagle3lab.evaluate.comparable import Aligned
    from eagle3lab.evaluate.comparison import Variant
    from eagle3lab.experiments.run_config import RunConfig

DESCRIPTION = (
    "Compare runs, or all runs of a sweep directory. Where every draft was decoded by evaluate.py: by their "
    "acceptance over the same prompts. Otherwise by what training measured, best first by train.select_by, with "
    "every run that did not finish. Runs that differ in seeds alone are one variant; every variant is held "
    "against the first."
)
SEED = 0
MOST_CHOICES = 3  # that stand with a variant's letter; more of them are in the table of what differs alone


def main(argv: Sequence[str]) -> int:
    """Compare and print; returns 0, also where no difference is shown.

    Raises UserError where the evaluations cannot be compared.
    """
    arguments = _parser().parse_args(list(argv))
    from eagle3lab.experiments.run_results import is_sweep

    if _by_training(arguments):
        return _compare_training(arguments)
    if any(is_sweep(Path(place).resolve()) for place in arguments.drafts):
        arguments.drafts = [name for place in arguments.drafts for name in _runs_named(Path(place))]
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
    groups = _groups(list(names), configs, arguments)
    differing = _differing([configs[group[0]] for group in groups])
    variants = _variants(list(names), configs, groups, differing)
    sections = compare_settings(aligned, groups, seed=SEED, resamples=RESAMPLES)
    comparison = Comparison(
        variants=tuple(variants),
        sections=tuple(sections),
        differing=differing,
        notes=(*notes(aligned, list(names)), *_unknown(variants, groups, configs)),
        method=tuple(method(variants, sections, SEED, RESAMPLES)),
    )
    written = []
    if arguments.out or arguments.html:
        from .compare_files import write_files

        written = write_files(comparison, arguments.out, arguments.html)
    if arguments.json:
        print(to_json(comparison))
    else:
        print_comparison(comparison, Console(width=None if sys.stdout.isatty() else 140))
        if written:
            print("written  " + ", ".join(map(str, written)))
    return 0


def _by_training(arguments: argparse.Namespace) -> bool:
    """Whether training's figures are compared: where asked for, and where a run was not evaluated."""
    from eagle3lab.evaluate.evaluation_file import find_evaluations
    from eagle3lab.experiments.run_results import is_run, runs_of

    if arguments.training or arguments.by:
        return True
    for given in map(Path, arguments.drafts):
        for place in runs_of(given):
            try:
                find_evaluations(place)
            except UserError:
                if place != given or is_run(place):  # a trial that never began has no directory
                    return True
    return False


def _compare_training(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from eagle3lab.config.selection import SelectBy
    from eagle3lab.experiments.compare_runs import compare_runs
    from eagle3lab.experiments.runs_report import print_runs, runs_json, write_runs

    for name in ("prompts", "k", "temperature", "backend", "common_prompts"):
        if getattr(arguments, name):
            option = "--" + name.replace("_", "-")
            raise UserError(
                Problem(
                    f"{option} is about evaluations, and not all of these runs have one",
                    fix="evaluate.py draft=RUN/draft",
                )
            )
    comparison = compare_runs(
        [Path(place) for place in arguments.drafts],
        by=SelectBy(arguments.by) if arguments.by else None,
        ignore=arguments.ignore,
        group=not arguments.no_group,
    )
    written = write_runs(comparison, out=arguments.out, html=arguments.html)
    if arguments.json:
        print(runs_json(comparison), end="")
    else:
        print_runs(comparison, Console(width=None if sys.stdout.isatty() else 140))
        if written:
            print("written  " + ", ".join(map(str, written)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m eagle3lab compare", description=DESCRIPTION)
    parser.add_argument(
        "drafts",
        metavar="RUN",
        nargs="+",
        help="a run, sweep, draft or evaluation directory, or an evaluation.json; the first is the baseline",
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
    parser.add_argument("--training", action="store_true", help="by what training measured, evaluated or not")
    parser.add_argument(
        "--by",
        choices=("loss", "simulated_acceptance", "real_acceptance"),
        help="by this figure of training instead of train.select_by's",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write comparison.csv and comparison.png")
    parser.add_argument(
        "--html", type=Path, metavar="FILE", help="write one page that needs nothing beside it"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")
    return parser


def _runs_named(place: Path) -> list[str]:
    """The runs that a place stands for, below the place as the user wrote it where they lie there."""
    from eagle3lab.experiments.run_results import runs_of

    whole = place.resolve()
    return [
        str(place / run.relative_to(whole) if run.is_relative_to(whole) else run) for run in runs_of(place)
    ]


def _names(drafts: Sequence[str]) -> dict[str, Path]:
    """What the user named -> where it is; a thing named twice is a mistake."""
    if len(drafts) < 2:
        from eagle3lab.evaluate.evaluation_file import find_evaluations

        find_evaluations(Path(drafts[0]))  # what is not there at all is said first
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


def _groups(
    names: Sequence[str], configs: Sequence[RunConfig | None], arguments: argparse.Namespace
) -> list[tuple[int, ...]]:
    """The runs of every variant, as positions in `names`; two at least."""
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
    return groups


def _variants(
    names: Sequence[str],
    configs: Sequence[RunConfig | None],
    groups: Sequence[Sequence[int]],
    differing: Mapping[str, Sequence[Any]],
) -> list[Variant]:
    """Each with the seeds that tell its runs apart and, where they are few, the keys that tell it from the others."""
    from eagle3lab.evaluate.comparison import Variant, label

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
    if not 0 < len(differing) <= MOST_CHOICES:
        return variants
    return [
        replace(v, choices=" ".join(f"{key}={as_typed(values[i])}" for key, values in differing.items()))
        for i, v in enumerate(variants)
    ]


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
