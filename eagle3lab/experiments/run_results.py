"""What a run came to, read from its directory: finished with figures, failed, or unfinished. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError

from .run_config import RunConfig, read_run_config
from .run_dir import CONFIG, FAILED, FINISHED, PROVENANCE, SUMMARY, SWEEP_INDEX, read_json
from .sweep_files import RUNNING, WAITING, Trial, read_trials

UNFINISHED = "unfinished"
_WHY = {
    RUNNING: "running, or killed",
    WAITING: "its turn did not come",
    FINISHED: "its directory is no longer there",
}
# figures of summary.json beside those of the validation, in words
SPEED = {
    "tokens_per_second": "tokens/s",
    "peak_memory_gib": "peak GiB",
    "data_wait_share": "data wait",
    "mfu": "MFU",
    "train_seconds": "train seconds",
    "updates": "updates",
    "tokens": "tokens",
}


@dataclass(frozen=True)
class RunResult:
    """One run. `figures` and `validation` are empty and `select_by` is None unless it finished."""

    place: Path
    name: str
    state: str  # FINISHED, FAILED or UNFINISHED
    reason: str = ""  # why it did not finish
    config: RunConfig | None = None
    overrides: tuple[str, ...] = ()
    figures: Mapping[str, float] = field(default_factory=dict)  # keys of SPEED
    validation: Mapping[str, float] = field(default_factory=dict)  # of the exported weights
    select_by: str | None = None
    limited_by: str = ""
    index: int = 0  # in the order in which the runs were named

    @property
    def finished(self) -> bool:
        return self.state == FINISHED


def read_results(places: Sequence[Path]) -> list[RunResult]:
    """Runs of run directories and of sweep directories, in their order; each once.

    Raises:
        UserError: a place is neither.
    """
    found: dict[Path, RunResult] = {}
    for place in places:
        directory = place.resolve()
        if is_sweep(directory):
            results = _read_sweep(directory)
        elif is_run(directory):
            results = [read_run(directory)]
        else:
            raise _no_run(place)
        for result in results:
            found.setdefault(result.place, result)
    return [RunResult(**{**vars(result), "index": i}) for i, result in enumerate(found.values())]


def is_run(directory: Path) -> bool:
    return (directory / CONFIG).is_file() or (directory / SUMMARY).is_file()


def is_sweep(directory: Path) -> bool:
    """A directory of run directories, with an index of its trials or without."""
    return not is_run(directory) and ((directory / SWEEP_INDEX).is_file() or bool(_runs_in(directory)))


def runs_of(place: Path) -> list[Path]:
    """The run directories that a place stands for: those of a sweep, or the place itself."""
    directory = place.resolve()
    return [result.place for result in _read_sweep(directory)] if is_sweep(directory) else [place]


def read_run(directory: Path, *, state: str | None = None, reason: str = "") -> RunResult:
    """One run directory. `state`, `reason`: what the sweep's index says of a run without a summary."""
    config = read_run_config(directory) if _is_written(directory / CONFIG) else None
    provenance = read_json(directory / PROVENANCE) if (directory / PROVENANCE).is_file() else {}
    overrides = tuple(provenance.get("overrides", ()))
    if not (directory / SUMMARY).is_file():
        return RunResult(
            place=directory,
            name=directory.name,
            state=state or UNFINISHED,
            reason=reason or f"no {SUMMARY}: running, killed or ended by an error",
            config=config,
            overrides=overrides,
        )
    summary = read_json(directory / SUMMARY)
    return RunResult(
        place=directory,
        name=directory.name,
        state=FINISHED,
        config=config,
        overrides=overrides,
        figures=_finite({key: summary.get(key) for key in SPEED}),
        validation=_finite(summary.get("best_validation") or summary.get("last_validation") or {}),
        select_by=(summary.get("selection") or {}).get("select_by"),
        limited_by=str(summary.get("limited_by", "")),
    )


def _read_sweep(directory: Path) -> list[RunResult]:
    """Every planned trial, also those that never had a directory, then run directories that no trial names."""
    results: dict[Path, RunResult] = {}
    for trial in _trials(directory):
        name = trial.run_dir or f"trial {trial.number}"
        place = (directory / name).resolve()
        state = FAILED if trial.state == FAILED else UNFINISHED
        reason = trial.error or _WHY.get(trial.state, trial.state)
        if trial.log:
            reason += f" ({directory / trial.log})"
        if trial.run_dir and is_run(place):
            results[place] = read_run(place, state=state, reason=reason)
        else:
            results[place] = RunResult(place, place.name, state, reason, overrides=trial.overrides)
    for place in _runs_in(directory):
        if place not in results:
            results[place] = read_run(place)
    return list(results.values())


def _trials(directory: Path) -> list[Trial]:
    """The trials of the index as their own records have them now: the index is of the sweep's start or end."""
    if not (directory / SWEEP_INDEX).is_file():
        return []
    index = read_json(directory / SWEEP_INDEX)
    entry = index.get("entry", "train")
    if entry != "train":
        raise UserError(
            Problem(f"a sweep of {entry}.py has no training runs", str(directory), "one of train.py")
        )
    records = {trial.number: trial for trial in read_trials(directory)}
    for planned in index.get("trials", []):
        told = {key: planned[key] for key in ("run_dir", "error", "log") if planned.get(key)}
        trial = Trial(planned["number"], tuple(planned["overrides"]), planned["state"], **told)
        records.setdefault(trial.number, trial)
    return [records[number] for number in sorted(records)]


def _runs_in(directory: Path) -> list[Path]:
    return sorted(p.resolve() for p in directory.iterdir() if is_run(p)) if directory.is_dir() else []


def _is_written(path: Path) -> bool:
    """A run that ended between claiming its directory and writing its configuration has an empty one."""
    return path.is_file() and path.stat().st_size > 0


def _finite(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value)
        for key, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }


def _no_run(place: Path) -> UserError:
    inside = sorted(p.name for p in place.iterdir() if is_sweep(p)) if place.is_dir() else []
    return UserError(
        Problem(
            "neither a run nor a sweep directory",
            str(place),
            f"a directory with {CONFIG}, or one of such directories",
            f"compare {place / inside[-1]}" if inside else "",
        )
    )
