"""Before the first trial of a sweep: its trials are checked, its directory is claimed or taken up again.

Hydra calls it (`hydra.callbacks`, registered in `config.compose`) in the process of the command, before it makes the
sweeper and the launcher. No torch.
"""

from __future__ import annotations

import importlib
import shlex
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf, open_dict

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.config.invocation import Invocation, evaluation_directory, named
from eagle3lab.config.names import is_silent
from eagle3lab.config.overruled import overruled
from eagle3lab.config.schema import EvaluateRoot, TrainRoot
from eagle3lab.config.stamp import is_rank_zero
from eagle3lab.config.sweep_grid import load_trial, trials_of
from eagle3lab.store.manifest import is_complete

from .run_dir import read_json
from .run_results import SWEEP_INDEX
from .sweep_files import read_trials, write_index

MAX_CHECKED = 64  # trials composed beforehand, 0.05 s each; later ones are checked when they run
begun: Path | None = None  # the directory of the sweep that this process drives


class SweepRefused(BaseException):
    """A `UserError` before the first trial. No Exception: Hydra turns those of callbacks into warnings."""

    def __init__(self, error: UserError) -> None:
        super().__init__(error)
        self.error = error


class SweepStart(Callback):
    """`prepare` names a function, `module:function`, that is called with the typed trials before they start."""

    def __init__(self, prepare: str) -> None:
        self.prepare = prepare

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """Raises `SweepRefused` with every problem of every trial."""
        try:
            self._start(config)
        except UserError as error:
            raise SweepRefused(error) from error
        except Exception as error:
            if not compose.is_composition_error(error):  # those come again, from Hydra itself
                raise SweepRefused(UserError(f"{type(error).__name__}: {error}")) from error

    def _start(self, config: DictConfig) -> None:
        global begun
        entry = _entry_of(config)
        grid, whole = trials_of(config)
        typed = _checked(config, entry, grid[:MAX_CHECKED])
        cfg, invocation = typed[0]
        sweep_dir = invocation.sweep_dir
        assert sweep_dir is not None
        _pin(config, sweep_dir)
        if getattr(cfg, "plan", False):
            return
        raise_all(_node_problems(typed))
        if not is_rank_zero():
            return
        about = _about(config, entry, invocation)
        if (sweep_dir / SWEEP_INDEX).is_file():
            _must_be_the_same(sweep_dir, read_json(sweep_dir / SWEEP_INDEX), about)
        if entry == "train" and not all(is_complete(Path(str(cfg.store))) for cfg, _ in typed):
            module, _, function = self.prepare.partition(":")
            getattr(importlib.import_module(module), function)(typed)
        sweep_dir.mkdir(parents=True, exist_ok=True)  # a sweep without a store leaves nothing behind
        done = len(read_trials(sweep_dir))
        count = f"{len(grid)} trials" if whole else "trials as the sweeper proposes them"
        taken_up = f", taken up again: {done} had begun" if done else ""
        print(f"sweep {about['name']}: {count} in {sweep_dir}{taken_up}")
        print(f"  to go on after an interruption: {about['continue']}", flush=True)
        write_index(sweep_dir, about, grid if whole else ())
        begun = sweep_dir


def _entry_of(config: DictConfig) -> str:
    """Whose keys the configuration has; the job's name may be anything."""
    return next(
        entry
        for entry, root in compose.ROOTS.items()
        if {f.name for f in fields(root)} <= set(map(str, config))
    )


def _checked(config: DictConfig, entry: str, grid: Sequence[Sequence[str]]) -> list[tuple[Any, Invocation]]:
    """Every trial as it will run, paths absolute.

    Raises UserError with all their problems; one that several trials have is told once.
    """
    typed: list[tuple[Any, Invocation]] = []
    problems: dict[str, Problem] = {}
    for number, overrides in enumerate(grid):
        trial = load_trial(config, overrides)
        with open_dict(trial.hydra):
            trial.hydra.mode = config.hydra.mode
        invocation = Invocation.of(trial.hydra, number)
        root, found = compose.to_typed(trial, compose.ROOTS[entry])
        found += overruled(trial, invocation.overrides, compose.config_directory())
        found = [*found, *(CHECKS[entry](root) if root is not None else [])]
        problems |= {str(problem): problem for problem in found}
        if root is not None and not found:
            typed.append((named(root, invocation) if isinstance(root, TrainRoot) else root, invocation))
    raise_all(list(problems.values()))
    return typed


def _node_problems(typed: Sequence[tuple[Any, Invocation]]) -> list[Problem]:
    problems = []
    places = [cfg.run_dir for cfg, _ in typed if isinstance(cfg, TrainRoot)]
    if len(set(places)) < len(places):
        problems.append(
            Problem(
                "run_dir names one directory for all trials",
                places[0],
                "a directory for the sweep",
                "hydra.sweep.dir=DIRECTORY in its place",
            )
        )
    written = Counter(evaluation_directory(c, i) for c, i in typed if isinstance(c, EvaluateRoot))
    if any(count > 1 for count in written.values()):
        place, count = written.most_common(1)[0]
        problems.append(
            Problem(
                "trials would write their evaluations over each other",
                f"{count} in {place}",
                "a directory for each",
                "lists in one trial: decode.k=[1,3,5] decode.temperature=[0.0,1.0]; a sweep over draft or prompts",
            )
        )
    cfg, invocation = typed[0]
    if cfg.hardware.trials_per_node > 1 and invocation.choices.get("launcher") != "joblib":
        problems.append(
            Problem(
                "hardware.trials_per_node is for several trials at a time on this node",
                cfg.hardware.trials_per_node,
                "the launcher that starts them",
                "launcher=joblib",
            )
        )
    return problems


def _pin(config: DictConfig, sweep_dir: Path) -> None:
    """Tell every trial the directory, wherever it runs: a stamp of the time would be another one there."""
    parser = OverridesParser.create()
    kept = [
        word
        for word in config.hydra.overrides.hydra
        if parser.parse_override(word).get_key_element() != "hydra.sweep.dir"
    ]
    with open_dict(config.hydra):
        config.hydra.sweep.dir = str(sweep_dir)
        config.hydra.overrides.hydra = [*kept, f"hydra.sweep.dir='{sweep_dir}'"]


def _about(config: DictConfig, entry: str, invocation: Invocation) -> dict[str, Any]:
    words = [Path(sys.argv[0]).name, *sys.argv[1:]]
    words = [word for word in words if not word.startswith("hydra.sweep.dir=")]
    params = OmegaConf.select(config, "hydra.sweeper.params")
    return {
        "name": str(config.hydra.job.config_name or entry),
        "entry": entry,
        "script": str(Path(sys.argv[0]).resolve()),
        "command": ["python", *words],
        "continue": shlex.join(["python", *words, f"hydra.sweep.dir={invocation.sweep_dir}"]),
        "overrides": list(config.hydra.overrides.task),
        "sweeper": str(config.hydra.runtime.choices.get("hydra/sweeper")),
        "launcher": str(config.hydra.runtime.choices.get("hydra/launcher")),
        "params": {str(k): str(v) for k, v in params.items()} if params else {},
    }


def _must_be_the_same(sweep_dir: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Where and how fast the trials run may change, what they are may not: their numbers name them."""

    def of(about: Mapping[str, Any]) -> dict[str, Any]:
        overrides = sorted(word for word in about.get("overrides", ()) if not is_silent(word))
        return {key: about.get(key) for key in ("entry", "name", "sweeper", "params")} | {
            "overrides": overrides
        }

    before, now = of(old), of(new)
    raise_all(
        [
            Problem(
                f"the directory holds another sweep ({key})",
                now[key],
                f"{before[key]} as in {sweep_dir / SWEEP_INDEX}",
                "another hydra.sweep.dir, or the command in that file",
            )
            for key in now
            if before[key] != now[key]
        ]
    )
