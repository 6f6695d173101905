"""Runs and sweeps side by side: what differs in configuration and in training's figures, best first.

Runs that differ in seeds alone are one variant, with the mean over its seeds. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.selection import FIGURES, NAMES, SIMULATED, STEP, SelectBy
from eagle3lab.config.value_text import as_typed

from .run_config import ABSENT, COMMIT, differing_keys, group_by_configuration, is_place, is_seed
from .run_results import SPEED, RunResult, read_results
from .seed_intervals import SeedMean, seed_mean

# losses of runs that differ in these are not the same quantity
_LOSS_KEYS = (
    "loss.kind",
    "loss.weights",
    "loss.lk_eta",
    "loss.step_decay",
    "draft.ttt_steps",
    "draft.vocab_size",
)
# nor are validations over other rows
_ROW_KEYS = ("store", "data.max_len", "data.validation_share", "train.seq_len")


@dataclass(frozen=True)
class Criterion:
    """By which figure runs are compared, the same quantity for all of them."""

    by: SelectBy
    num_steps: int | None = None  # of simulated acceptance, where runs were unrolled for different numbers

    @property
    def name(self) -> str:
        if self.num_steps is None:
            return NAMES[self.by]
        return f"{NAMES[self.by]}, first {self.num_steps} step{'s' if self.num_steps > 1 else ''}"

    def value(self, run: RunResult) -> float | None:
        """The run's figure at the validation of its exported weights; None where it was not measured."""
        if self.num_steps is None or SIMULATED not in run.validation:
            return run.validation.get(FIGURES[self.by])
        return 1.0 + sum(run.validation[f"{STEP}{k}"] for k in range(self.num_steps))

    def better_first(self, value: float) -> float:
        """Smaller for a better value."""
        return value if self.by is SelectBy.loss else -value


@dataclass(frozen=True)
class RunVariant:
    """Runs that differ in seeds alone. Means are over the finished ones that have the figure."""

    label: str
    runs: tuple[RunResult, ...]
    settings: Mapping[str, Any]  # nested keys that differ between variants -> the value here
    value: SeedMean | None  # of the criterion
    change: SeedMean | None  # of the criterion against the baseline, paired by seeds
    means: Mapping[str, float]  # "val/loss" and keys of SPEED

    @property
    def finished(self) -> list[RunResult]:
        return [run for run in self.runs if run.finished]


@dataclass(frozen=True)
class RunComparison:
    """All of it. `variants` are best first, those without a figure last; `baseline` is the first one named."""

    criterion: Criterion
    variants: tuple[RunVariant, ...]
    baseline: str
    runs: tuple[RunResult, ...]
    notes: tuple[str, ...]
    method: tuple[str, ...]

    @property
    def not_finished(self) -> list[RunResult]:
        return [run for run in self.runs if not run.finished]


def compare_runs(
    places: Sequence[Path],
    *,
    by: SelectBy | None = None,
    ignore: Collection[str] = (),
    group: bool = True,
) -> RunComparison:
    """Compare runs and sweeps by what training measured.

    Args:
        places: run directories and sweep directories.
        by: the criterion; default: the `train.select_by` of the runs.
        ignore: nested configuration keys, or groups of them, that make no other variant.
        group: whether runs that differ in seeds alone are one variant.

    Raises:
        UserError: a place is no run and no sweep, or nothing is in them.
    """
    runs = read_results(places)
    if not runs:
        raise UserError(Problem("no run to compare", ", ".join(map(str, places))))
    runs, repeats = _without_repeats(runs, ignore) if group else (runs, [])
    configs = [run.config for run in runs]
    groups = group_by_configuration(configs, ignore) if group else [(i,) for i in range(len(runs))]
    differing = differing_keys([configs[members[0]] for members in groups], ignore)
    criterion, notes = _criterion([run for run in runs if run.finished], differing, by)
    labels = _labels([[runs[i] for i in members] for members in groups], differing, by_seed=not group)
    baseline = {_seeds(runs[i]): criterion.value(runs[i]) for i in groups[0] if runs[i].finished}
    variants = [
        _variant(
            label, [runs[i] for i in members], differing, criterion, baseline if members != groups[0] else {}
        )
        for label, members in zip(labels, groups, strict=True)
    ]
    order = sorted(
        variants,
        key=lambda v: (v.value is None, criterion.better_first(v.value.mean) if v.value else 0.0),
    )
    return RunComparison(
        criterion=criterion,
        variants=tuple(order),
        baseline=labels[0],
        runs=tuple(runs),
        notes=(*notes, *repeats, *_row_notes(differing)),
        method=tuple(_method(order, criterion, labels[0])),
    )


def _variant(
    label: str,
    runs: Sequence[RunResult],
    differing: Sequence[str],
    criterion: Criterion,
    baseline: Mapping[Any, float | None],
) -> RunVariant:
    finished = [run for run in runs if run.finished]
    values = {_seeds(run): criterion.value(run) for run in finished}
    changes = [v - b for s, v in values.items() if v is not None and (b := baseline.get(s)) is not None]
    means = {}
    for key in ("val/loss", *SPEED):
        found = [x for r in finished if (x := {**r.figures, **r.validation}.get(key)) is not None]
        if found:
            means[key] = sum(found) / len(found)
    config = runs[0].config
    return RunVariant(
        label=label,
        runs=tuple(runs),
        settings={key: config.values.get(key, ABSENT) if config else "?" for key in differing},
        value=seed_mean([v for r in finished if (v := criterion.value(r)) is not None]),
        change=seed_mean(changes),
        means=means,
    )


def _seeds(run: RunResult) -> tuple[tuple[str, Any], ...]:
    return tuple(sorted(run.config.seeds.items())) if run.config else ()


def _criterion(
    finished: Sequence[RunResult], differing: Sequence[str], by: SelectBy | None
) -> tuple[Criterion, list[str]]:
    """What to order by, and what must be said of the choice."""
    notes = []
    given = sorted({run.select_by for run in finished if run.select_by})
    chosen = by or (SelectBy(given[0]) if len(given) == 1 else SelectBy.simulated_acceptance)
    if by is None and len(given) > 1:
        notes.append(
            f"the runs selected by different figures ({', '.join(given)}): ordered by {NAMES[chosen]}"
        )
    unlike = [key for key in differing if any(key == k or key.startswith(f"{k}.") for k in _LOSS_KEYS)]
    if unlike:
        notes.append(f"validation losses are no one quantity here: {', '.join(unlike)} differ")
    if chosen is SelectBy.loss and unlike and by is None:
        chosen = SelectBy.simulated_acceptance
        notes.append(f"therefore ordered by {NAMES[chosen]}")
    if chosen is SelectBy.real_acceptance and "train.acceptance.k" in differing:
        notes.append("real acceptance lengths were measured with different train.acceptance.k")
    if chosen is not SelectBy.simulated_acceptance:
        return Criterion(chosen), notes
    steps = {n for run in finished if (n := sum(key.startswith(STEP) for key in run.validation))}
    if len(steps) > 1:
        notes.append(
            f"the runs were unrolled for {', '.join(map(str, sorted(steps)))} steps: the simulated acceptance "
            f"length counts the first {min(steps)} of each; evaluate.py tells what longer drafts are worth"
        )
        return Criterion(chosen, min(steps)), notes
    return Criterion(chosen), notes


def _without_repeats(runs: Sequence[RunResult], ignore: Collection[str]) -> tuple[list[RunResult], list[str]]:
    """Leave out, and name, finished runs whose configuration and seeds a finished run before has."""
    kept: list[RunResult] = []
    notes = []
    for run in runs:
        same = next(
            (k for k in kept if k.finished and run.finished and k.config and run.config
             and _seeds(k) == _seeds(run) and not differing_keys([k.config, run.config], ignore)),
            None,
        )  # fmt: skip
        if same:
            notes.append(f"{run.name} repeats {same.name}, seeds included, and is not counted again")
        else:
            kept.append(run)
    return kept, notes


def _labels(groups: Sequence[Sequence[RunResult]], differing: Sequence[str], *, by_seed: bool) -> list[str]:
    """What was chosen on the command line for one variant and not for all; else the values that differ."""
    firsts = [runs[0] for runs in groups]
    told = [[o for o in run.overrides if by_seed or not _is_silent(o)] for run in firsts]
    common = set.intersection(*map(set, told))
    labels = [" ".join(o for o in overrides if o not in common) for overrides in told]
    if len(set(labels)) < len(labels):
        values = [run.config.values if run.config else None for run in firsts]
        labels = [
            " ".join(f"{k}={as_typed(v.get(k, ABSENT))}" for k in differing[:4]) if v is not None else ""
            for v in values
        ]
    if len(set(labels)) < len(labels):
        labels = [run.name for run in firsts]
    if len(set(labels)) < len(labels):
        labels = [f"{run.place.parent.name}/{run.name}" for run in firsts]
    return [label or "(as configured)" for label in labels]


def _is_silent(override: str) -> bool:
    key = override.lstrip("+").partition("=")[0]
    return is_seed(key) or is_place(key)


def _row_notes(differing: Sequence[str]) -> list[str]:
    rows = [key for key in differing if key in _ROW_KEYS]
    said = [f"validated on rows that may differ: {', '.join(rows)}"] if rows else []
    if COMMIT in differing:
        said.append(
            "the runs were made by different code (git.commit); --ignore git.commit makes it no difference"
        )
    return said


def _method(variants: Sequence[RunVariant], criterion: Criterion, baseline: str) -> list[str]:
    said = [f"{criterion.name}: at the validation whose weights were exported, teacher-forced"
            if criterion.by is not SelectBy.real_acceptance
            else f"{criterion.name}: at the validation whose weights were exported, by decoding"]  # fmt: skip
    if any(v.value and v.value.num_runs > 1 for v in variants):
        said.append(
            "intervals: 95 %, Student's t over seeds; differences are paired by seed against "
            f"{baseline}; every interval stands for itself, without a correction for their number"
        )
    if any(v.value and v.value.num_runs == 1 for v in variants):
        said.append("a variant of one seed has no interval: it does not tell a gain from the luck of a seed")
    return said
