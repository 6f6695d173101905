"""One trial of a sweep: skipped when it is finished, taken up when it had begun, and its failure kept to itself."""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, StoppedBySignal, UserError
from eagle3lab.config.invocation import Invocation, named
from eagle3lab.config.names import is_silent
from eagle3lab.config.schema import EvaluateRoot, ExtractRoot, TrainRoot
from eagle3lab.config.selection import SIMULATED
from eagle3lab.config.stamp import is_rank_zero
from eagle3lab.config.value_text import as_typed

from .run_dir import CONFIG, SUMMARY, read_json
from .run_results import FAILED, FINISHED, SWEEP_INDEX
from .sweep_files import RUNNING, STOPPED, WAITING, Trial, held, read_trial, record_file, write_trial
from .sweep_start import SweepRefused
from .trial_process import num_unstarted, quoted, run_as_command

_told_to_stop = False  # this process starts no further trial
# launchers whose trials run beside each other in processes that share the terminal
_BESIDE_EACH_OTHER = ("joblib", "ray")

Run = Callable[[Any, Invocation], float | None]


def run_trial(
    configured: Callable[[], Any], run: Run, invocation: Invocation, has_checkpoint: Callable[[Path], bool]
) -> float | None:
    """Run one job of a multirun; returns what `run` returns, None when it did not come to an end.

    Nothing is raised for a failed trial: what Hydra and the launchers make of an exception would stop others. The
    sweep's end counts the records instead. `configured` gives the checked configuration or raises UserError;
    `has_checkpoint` says whether a run directory can be resumed. Raises SweepRefused when the trial's number has a
    damaged record, or one of another trial.
    """
    global _told_to_stop
    sweep_dir, number = invocation.sweep_dir, invocation.job_num
    assert sweep_dir is not None
    writes, chosen = is_rank_zero(), invocation.choices.get("hydra/launcher")
    log = record_file(sweep_dir, number, ".log")
    trial = Trial(number, invocation.overrides, RUNNING)

    def note(state: str, **changes: Any) -> None:
        nonlocal trial
        trial = dataclasses.replace(trial, state=state, **changes)
        if writes:
            write_trial(sweep_dir, trial)

    if _told_to_stop:
        if read_trial(sweep_dir, number) is None:
            note(WAITING)
        return None
    try:
        earlier = read_trial(sweep_dir, number)
        if earlier:
            _must_be_the_same(earlier, trial.overrides)
    except UserError as error:  # its record is not overwritten, and the others cannot be told apart either
        raise SweepRefused(error) from error
    try:
        if earlier and earlier.state == FINISHED and _is_there(sweep_dir, earlier):
            _say(f"trial {number} finished before: {earlier.value}", writes)
            return earlier.value
        with held(sweep_dir, number) if writes else nullcontext():
            cfg = configured()
            if isinstance(cfg, TrainRoot):
                cfg = named(cfg, invocation)
                run_dir = Path(str(cfg.run_dir))
                trial = dataclasses.replace(trial, run_dir=os.path.relpath(run_dir, sweep_dir))
                if (run_dir / SUMMARY).is_file():  # killed after its end and before its record
                    note(FINISHED, value=_value(run_dir))
                    return trial.value
                cfg = taken_up(cfg, run_dir, has_checkpoint, writes)
            note(RUNNING)
            beside = chosen in _BESIDE_EACH_OTHER
            if beside:
                _say(f"trial {number} begins: {' '.join(invocation.overrides)}\n  log {log}", writes)
            with _output_to(log) if beside else nullcontext():
                value = _run(cfg, run, invocation)
            told = value if value is not None and math.isfinite(value) else None  # NaN is no JSON
            note(FINISHED, value=told, log=_relative(log, sweep_dir))
            _say(f"trial {number} finished: {value}", writes and beside)
            return value
    except StoppedBySignal as error:
        _told_to_stop = True
        note(STOPPED, error=error.render())
        _say(f"trial {number} stopped: {error.render()}", writes)
    except Exception as error:
        text = error.render() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        with open(log, "a", encoding="utf-8") as file:
            traceback.print_exc(file=file)
        note(FAILED, error=text, log=_relative(log, sweep_dir))
        print(f"trial {number} failed: {text}\n  log {log}", file=sys.stderr, flush=True)
    except BaseException:  # Ctrl-C, or a library that exits
        _told_to_stop = True
        note(STOPPED, error="interrupted")
        raise
    return None


def _run(cfg: Any, run: Run, invocation: Invocation) -> float | None:
    """The trial in this process, or in one of its own where it is several processes."""
    if not isinstance(cfg, (TrainRoot, ExtractRoot, EvaluateRoot)):
        return run(cfg, invocation)
    import torch

    from .node_share import share_of_node

    sweep_dir = invocation.sweep_dir
    assert sweep_dir is not None
    cfg.hardware = share_of_node(cfg.hardware, sweep_dir, torch.cuda.device_count)
    if not isinstance(cfg, TrainRoot):
        return run(cfg, invocation)
    devices = num_unstarted(cfg.hardware, torch.cuda.device_count)
    if devices is None:
        return run(cfg, invocation)
    run_dir = Path(str(cfg.run_dir))
    index = sweep_dir / SWEEP_INDEX
    script = str(read_json(index)["script"]) if index.is_file() else sys.argv[0]
    overrides = {
        "run_dir": quoted(run_dir),
        "resume": as_typed(cfg.resume),
        "hardware.trials_per_node": "1",
    }
    overrides["hardware.num_devices"] = str(devices)
    overrides["hardware.num_loader_threads"] = str(cfg.hardware.num_loader_threads)
    if cfg.logger.wandb.group is None:
        overrides["logger.wandb.group"] = quoted(Path(sweep_dir.name))
    run_as_command(script, invocation, overrides)
    return _value(run_dir)


def taken_up(
    cfg: TrainRoot, run_dir: Path, has_checkpoint: Callable[[Path], bool], writes: bool
) -> TrainRoot:
    """`cfg` as it goes on with what an earlier start left; where that is no checkpoint it begins anew."""
    if not (run_dir / CONFIG).is_file():
        return cfg
    if has_checkpoint(run_dir):
        return dataclasses.replace(cfg, resume=True)
    _say(f"{run_dir} had begun and saved no checkpoint: it begins anew", writes)
    if writes:
        (run_dir / CONFIG).unlink()  # what claims the directory; everything else is written again
    return cfg


def _must_be_the_same(earlier: Trial, overrides: tuple[str, ...]) -> None:
    before, now = (sorted(w for w in words if not is_silent(w)) for words in (earlier.overrides, overrides))
    if before != now:
        expected = " ".join(before)
        raise UserError(
            Problem(f"trial {earlier.number} of this directory was another one", " ".join(now), expected)
        )


def _is_there(sweep_dir: Path, trial: Trial) -> bool:
    """Whether the directory of a finished training run was not taken away since."""
    return trial.run_dir is None or (sweep_dir / trial.run_dir / SUMMARY).is_file()


def _value(run_dir: Path) -> float | None:
    """What the finished training run returned."""
    summary = read_json(run_dir / SUMMARY)
    value = (summary.get("best_validation") or summary.get("last_validation") or {}).get(SIMULATED)
    return None if value is None else float(value)


@contextmanager
def _output_to(log: Path) -> Iterator[None]:
    """Everything this process prints goes to `log`, also what libraries and child processes print."""
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(log, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)


def _relative(path: Path, sweep_dir: Path) -> str:
    return os.path.relpath(path, sweep_dir) if path.is_file() else ""


def _say(text: str, writes: bool) -> None:
    if writes:
        print(text, flush=True)
