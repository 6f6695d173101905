"""The end of a sweep: its index, what failed, the comparison of its runs, and the exit code."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from eagle3lab.config.errors import EXIT_STOPPED, UserError

from .run_dir import read_json
from .run_results import FAILED, FINISHED, SWEEP_INDEX
from .sweep_files import read_trials, write_index

EXIT_FAILED_TRIAL = 1


def end_sweep(sweep_dir: Path) -> int:
    """Write the index, print and write the comparison; returns 0 only when every trial finished."""
    about = read_json(sweep_dir / SWEEP_INDEX)
    planned = [trial["overrides"] for trial in about.pop("trials")]
    write_index(sweep_dir, about, planned)
    trials = read_json(sweep_dir / SWEEP_INDEX)["trials"]
    finished = [trial for trial in trials if trial["state"] == FINISHED]
    failed = [trial for trial in trials if trial["state"] == FAILED]
    print(
        f"sweep {about['name']}: {len(finished)} of {len(trials)} trials finished, {len(failed)} failed",
        flush=True,
    )
    for trial in failed:
        where = f"\n  log {sweep_dir / trial['log']}" if trial["log"] else ""
        print(f"error: trial {trial['number']} failed: {trial['error']}{where}", file=sys.stderr)
    unfinished = len(trials) - len(finished) - len(failed)
    if failed or unfinished:
        print(f"  to go on with the other {len(trials) - len(finished)}: {about['continue']}", flush=True)
    if about["entry"] == "train" and any(trial.run_dir for trial in read_trials(sweep_dir)):
        _compare(sweep_dir, bool(finished))
    if failed:
        return EXIT_FAILED_TRIAL
    return EXIT_STOPPED if unfinished else 0


def _compare(sweep_dir: Path, any_finished: bool) -> None:
    command = f"python -m eagle3lab compare {shlex.quote(str(sweep_dir))}"
    if not any_finished:
        print(f"nothing to compare yet; later: {command}")
        return
    from rich.console import Console

    from .compare_runs import compare_runs
    from .runs_report import print_runs, write_runs

    try:
        comparison = compare_runs([sweep_dir])
        print_runs(comparison, Console(width=None if sys.stdout.isatty() else 140))
        written = write_runs(comparison, out=sweep_dir, html=sweep_dir / "comparison.html")
    except UserError as error:
        print(f"the runs are not compared: {error.render()}\n  later: {command}")
        return
    print(f"written  {', '.join(map(str, written))}\n  again: {command}")
