"""What a sweep keeps beside its run directories: an index, and a record of every trial that began. No torch.

Trials run in many processes, perhaps on many machines. Each writes its own record and nobody else's; the index is
made from them when the sweep starts and when it ends.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from eagle3lab.config.errors import IntegrityError, Problem, UserError

from .run_dir import FAILED, FINISHED, SWEEP_INDEX, read_json, write_json

RECORDS = "trials"
FORMAT_VERSION = 1
RUNNING = "running"  # also of a trial that was killed
STOPPED = "stopped"  # by a signal, with everything saved
WAITING = "waiting"  # its turn came after the sweep was told to stop
STATES = (FINISHED, FAILED, RUNNING, STOPPED, WAITING)


@dataclass(frozen=True)
class Trial:
    """One trial. `run_dir` (of a training run) and `log` are relative to the sweep's directory."""

    number: int
    overrides: tuple[str, ...]
    state: str
    run_dir: str | None = None
    value: float | None = None  # what the command returned: a sweeper's objective
    error: str = ""
    log: str = ""
    host: str = dataclasses.field(default_factory=socket.gethostname)


def record_file(sweep_dir: Path, number: int, suffix: str = ".json") -> Path:
    return sweep_dir / RECORDS / f"{number:03d}{suffix}"


def write_trial(sweep_dir: Path, trial: Trial) -> None:
    """Replace the trial's record."""
    path = record_file(sweep_dir, trial.number)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, dataclasses.asdict(trial))


def read_trial(sweep_dir: Path, number: int) -> Trial | None:
    """The trial's record, None where it has not begun. Raises IntegrityError for a record that is none."""
    path = record_file(sweep_dir, number)
    if not path.is_file():
        return None
    content = read_json(path)
    try:
        trial = Trial(**{**content, "overrides": tuple(content["overrides"])})
    except (KeyError, TypeError) as error:
        raise IntegrityError(Problem(f"{path} is no record of a trial", str(error))) from error
    if trial.state not in STATES:
        raise IntegrityError(Problem(f"{path}: state", trial.state, f"one of {', '.join(STATES)}"))
    return trial


def read_trials(sweep_dir: Path) -> list[Trial]:
    """All records, by number."""
    numbers = sorted(int(path.stem) for path in (sweep_dir / RECORDS).glob("[0-9]*.json"))
    trials = [read_trial(sweep_dir, number) for number in numbers]
    return [trial for trial in trials if trial is not None]


def write_index(sweep_dir: Path, about: Mapping[str, Any], planned: Sequence[Sequence[str]] = ()) -> None:
    """`sweep.json`: what the sweep is, and its trials as they stand; those `planned` that have no record wait."""
    trials = {trial.number: dataclasses.asdict(trial) for trial in read_trials(sweep_dir)}
    for number, overrides in enumerate(planned):
        if number not in trials:
            trials[number] = {"number": number, "overrides": list(overrides), "state": WAITING}
    content = {**about, "format_version": FORMAT_VERSION, "trials": [trials[n] for n in sorted(trials)]}
    write_json(sweep_dir / SWEEP_INDEX, content)


@contextmanager
def held(sweep_dir: Path, number: int) -> Iterator[None]:
    """Keep a trial to this process while it runs. The lock of a killed process is free again.

    Raises UserError when another process runs the trial, such as a job that outlived the command it came from.
    """
    path = record_file(sweep_dir, number, ".lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        problem = Problem(f"another process is running trial {number}", str(path), "wait for it, or end it")
        raise UserError(problem) from error
    try:
        yield
    finally:
        lock.release()
