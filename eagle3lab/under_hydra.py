"""A command under Hydra: one message per mistake, one job or the trials of a sweep, and the exit code."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import hydra
from omegaconf import DictConfig

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import PeerLost, StoppedBySignal, UserError, raise_all
from eagle3lab.config.foreign_code import foreign_code
from eagle3lab.config.help import help_text
from eagle3lab.config.invocation import Invocation, named
from eagle3lab.config.launcher import launcher_problems
from eagle3lab.config.names import CHECKPOINTS
from eagle3lab.config.overruled import overruled
from eagle3lab.config.places import usable_places
from eagle3lab.config.schema import TrainRoot
from eagle3lab.config.stamp import is_rank_zero, is_requeued, local_rank
from eagle3lab.config.words import command_line, overrides_of
from eagle3lab.experiments import sweep_start
from eagle3lab.experiments.sweep_start import SweepRefused

_QUIET = "EAGLE3LAB_QUIET_ERRORS"
# before the processes of a run have met, each finds the same mistake: where the first one of a node ends, torchrun
# ends the others in less
SECONDS_TO_BE_ENDED = 2.0


def run_command(entry: str, run: Callable[[Any, Invocation], float | None]) -> None:
    """Compose the command line of `entry`, check it, and run it, once or as a sweep; exits where it must.

    Exit codes: 2 for a user's mistake, 1 for a sweep in which a trial failed, 143 for what a signal stopped.
    `HYDRA_FULL_ERROR=1` shows tracebacks.
    """
    show_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1" and _QUIET not in os.environ
    if not show_traceback:  # makes Hydra raise instead of exiting with 1, so that the message is made here
        os.environ["HYDRA_FULL_ERROR"] = os.environ[_QUIET] = "1"
    compose.register()
    sys.argv[1:] = command_line(entry, sys.argv[1:])
    if {"--help", "-h"} & set(sys.argv[1:]):
        try:
            print(help_text(entry, sys.argv[1:], CHECKS[entry]))
        except UserError as error:
            exit_with(error)
        return

    def task(cfg: DictConfig) -> float | None:
        _hear_warnings()
        invocation = Invocation.current()

        def run_together(cfg: Any, invocation: Invocation) -> float | None:
            from eagle3lab.training.peers import together

            with together(), usable_places():
                return run(cfg, invocation)

        def configured() -> Any:
            typed, problems = compose.to_typed(cfg, compose.ROOTS[entry])
            problems += overruled(cfg, invocation.overrides, compose.config_directory())
            problems += launcher_problems()
            raise_all([*problems, *(CHECKS[entry](typed) if typed is not None else [])])
            if is_rank_zero() and (said := foreign_code(typed.model)):
                print(said)
            return typed

        if invocation.sweep_dir is not None and not cfg.get("plan", False):
            from eagle3lab.experiments.sweep_trial import run_trial

            return run_trial(configured, run_together, invocation, _has_checkpoint)
        try:
            with usable_places():
                return run_together(_taken_up(configured(), invocation), invocation)
        except UserError as error:
            if show_traceback:
                raise
            exit_with(error)

    decorated: Callable[[], Any] = hydra.main(str(compose.config_directory()), entry, version_base="1.3")(
        task
    )
    try:
        with usable_places():
            decorated()
    except SweepRefused as refused:
        if show_traceback:
            raise refused.error from refused
        exit_with(refused.error)
    except UserError as error:
        if show_traceback:
            raise
        exit_with(error)
    except Exception as error:
        if show_traceback or not compose.is_composition_error(error):
            raise
        exit_with(compose.explain(error, entry, overrides_of(sys.argv[1:]), CHECKS[entry]))
    finally:
        code = _end_of_sweep()
    if code:
        sys.exit(code)


def _hear_warnings() -> None:
    """Of libraries no less than warnings: Hydra's handler would print as its own what they tell of themselves."""
    logging.getLogger().setLevel(logging.WARNING)
    for name in ("hydra", "hydra_plugins"):
        logging.getLogger(name).setLevel(logging.INFO)


def _end_of_sweep() -> int:
    """Report on the sweep that this process drove, if any, however it ended; returns its exit code."""
    if sweep_start.begun is None:
        return 0
    from eagle3lab.experiments.sweep_end import end_sweep

    return end_sweep(sweep_start.begun)


def _taken_up(cfg: Any, invocation: Invocation) -> Any:
    """`cfg`; of a job that SLURM requeued, as it goes on with what its first start left."""
    if not is_requeued() or not isinstance(cfg, TrainRoot):
        return cfg
    from eagle3lab.experiments.sweep_trial import taken_up

    cfg = named(cfg, invocation)
    return taken_up(cfg, Path(str(cfg.run_dir)), _has_checkpoint, is_rank_zero())


def _has_checkpoint(run_dir: Path) -> bool:
    from eagle3lab.training.checkpoint_files import LAST, PREVIOUS

    return any((run_dir / CHECKPOINTS / name).is_file() for name in (LAST, PREVIOUS))


def exit_with(error: UserError) -> NoReturn:
    """Print `error`, where no other process of the run does, and end with its code."""
    is_told = not is_rank_zero() if isinstance(error, StoppedBySignal) else error.told
    if is_told is None and local_rank() > 0:
        time.sleep(SECONDS_TO_BE_ENDED)
    if not is_told:
        print(f"error: {error.render()}", file=sys.stderr)
    if isinstance(error, PeerLost):  # what is left of the process group cannot be taken down
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(error.exit_code)
    sys.exit(error.exit_code)
