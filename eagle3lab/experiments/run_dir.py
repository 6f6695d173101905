"""A run directory belongs to one run: claimed once, never overwritten, resumed only when asked."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.names import CHECKPOINTS, METRICS
from eagle3lab.store.files import locked, write_text

CONFIG = "config.yaml"
PROVENANCE = "provenance.json"
SUMMARY = "summary.json"
SWEEP_INDEX = "sweep.json"  # of a directory of run directories, see `sweep_files`
FINISHED, FAILED = "finished", "failed"  # what became of a run or a trial


def claim(run_dir: Path, *, resume: bool) -> None:
    """Make `run_dir` for this run, or take it up again.

    Raises `UserError` when it exists and `resume` is false, or when there is nothing to resume.
    An existing directory without a configuration (an earlier start that failed at once) may be claimed.
    """
    if resume:
        if not (run_dir / CONFIG).is_file():
            raise UserError(
                Problem(
                    "nothing to resume: no run in",
                    str(run_dir),
                    "a run directory with config.yaml",
                    "run_dir=THE_RUN resume=true, or resume=false",
                )
            )
        return
    run_dir.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(run_dir / CONFIG, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        raise UserError(
            Problem(
                "the run directory is taken",
                str(run_dir),
                "a new directory, or resume=true to go on in this one",
                shlex.join(["resume=true", f"run_dir={run_dir}"]),
            )
        ) from None


@contextmanager
def claimed(run_dir: Path, *, resume: bool) -> Iterator[None]:
    """`claim`, undone where the run is refused before it has trained, or fails before it says where it came from.

    The corrected command finds the directory free then.
    """
    created = [path for path in (run_dir, *run_dir.parents) if not path.exists()]
    claim(run_dir, resume=resume)
    try:
        yield
    except BaseException as error:
        if not resume and (isinstance(error, UserError) or not (run_dir / PROVENANCE).is_file()):
            _give_back(run_dir, created)
        raise


def _give_back(run_dir: Path, created: Sequence[Path]) -> None:
    """Undo a `claim` that `created` these directories, unless something was trained since."""
    metrics = run_dir / METRICS
    has_figures = metrics.is_file() and len(metrics.read_bytes().splitlines()) > 1
    if has_figures or any((run_dir / CHECKPOINTS).glob("*")):
        return
    for name in (CONFIG, PROVENANCE, METRICS):
        (run_dir / name).unlink(missing_ok=True)
    for directory in created:
        with suppress(OSError):  # somebody else's files are in it
            directory.rmdir()


@contextmanager
def only_run_in(run_dir: Path) -> Iterator[None]:
    """Keep other processes from going on in `run_dir`: two would write over each other's files.

    Raises `UserError` when another does.
    """
    taken = Problem(
        "another process is training in the run directory",
        str(run_dir),
        "one at a time",
        "wait for it or end it, then the same command; or another run_dir",
    )
    with locked(run_dir, taken) as is_locked:
        if not is_locked:
            print(f"{run_dir} cannot be locked: do not go on in it from two processes")
        yield


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Sorted, indented JSON. NaN and infinity are refused: they are no JSON."""
    write_text(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False, default=str) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; an unreadable one is a `UserError` that names the file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(Problem(f"cannot read {path}", str(error))) from error
    if not isinstance(content, dict):
        raise UserError(Problem(f"{path} holds no JSON object"))
    return content
