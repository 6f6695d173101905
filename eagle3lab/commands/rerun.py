"""`python -m eagle3lab rerun RUN`: repeat a training run from its own files and say what differs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError

DESCRIPTION = (
    "Repeat a finished training run from the resolved configuration in its directory, in a new directory, over the "
    "same store. Says what differs in configuration, environment and numbers: on a CPU nothing should."
)
REPORT = "rerun.json"


def main(argv: Sequence[str]) -> int:
    """Repeat, compare, print; the exit code is that of training, 0 where it ran, whatever differs.

    Raises UserError where the run cannot be repeated.
    """
    parser = argparse.ArgumentParser("python -m eagle3lab rerun", description=DESCRIPTION)
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory of train.py")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the new run directory")
    parser.add_argument("--store", type=Path, metavar="DIR", help="where the run's store is now")
    arguments = parser.parse_args(list(argv))
    from eagle3lab.config.stamp import run_stamp
    from eagle3lab.experiments.rerun import require_repeatable, write_primary
    from eagle3lab.experiments.run_dir import CONFIG

    run = arguments.run.resolve()
    store = require_repeatable(run, arguments.store)
    new = (arguments.out or Path("outputs") / f"rerun-{run.name}" / run_stamp()).resolve()
    if (new / CONFIG).exists():
        raise UserError(Problem("the run directory is taken", str(new), "a new one", "--out DIR"))
    words = write_primary(run, new, store)
    print(f"repeating {run}\n  in      {new}", flush=True)
    code = subprocess.run([*_training(), *words], check=False).returncode
    if code:
        return code
    _report(run, new)
    return 0


def _training() -> list[str]:
    """train.py of a checkout, which other ranks can be started by too; else its one line."""
    script = Path(__file__).resolve().parents[2] / "train.py"
    if script.is_file():
        return [sys.executable, str(script)]
    return [sys.executable, "-c", "from eagle3lab.cli import main; main('train')"]


def _report(run: Path, new: Path) -> None:
    from eagle3lab.experiments import rerun
    from eagle3lab.experiments.run_dir import PROVENANCE, read_json, write_json

    configuration = rerun.differing_configuration(run, new)
    environment = rerun.differing_environment(run, new)
    num_rows, metrics = rerun.differing_metrics(run, new)
    old_weights, new_weights = rerun.weights_sha256(run), rerun.weights_sha256(new)
    _say("configuration", configuration)
    _say("environment  ", environment)
    if any((read_json(d / PROVENANCE).get("git") or {}).get("dirty") for d in (run, new)):
        print("  NOTE: the code had changes that no commit holds; whether they are the same is not known")
    if metrics:
        worst = ", ".join(f"{name} by {value:.3g}" for name, value in metrics.items())
        print(f"metrics.csv    differs, at most: {worst}")
    else:
        print(f"metrics.csv    equal in all {num_rows} rows, timings apart")
    if old_weights == new_weights:
        print(f"weights        equal to the bit, sha256 {new_weights}")
    else:
        print(f"weights        differ: sha256 {old_weights} before, {new_weights} now")
        print(f"               largest difference {_largest_difference(run, new)}")
    content = {
        "run": str(run),
        "configuration": configuration,
        "environment": environment,
        "metrics": {name: str(value) for name, value in metrics.items()},
        "weights": {"before": old_weights, "now": new_weights},
    }
    write_json(new / REPORT, content)
    print(f"report         {new / REPORT}")


def _say(title: str, differing: Mapping[str, tuple[Any, Any]]) -> None:
    if not differing:
        print(f"{title}  the same")
    for i, (key, (before, now)) in enumerate(differing.items()):
        print(f"{title if i == 0 else ' ' * len(title)}  {key}: {_text(before)} before, {_text(now)} now")


def _text(value: Any) -> str:
    return "(none)" if value is None else str(value)


def _largest_difference(run: Path, new: Path) -> str:
    from safetensors.torch import load_file

    from eagle3lab.experiments.rerun import WEIGHTS

    old, now = load_file(run / WEIGHTS), load_file(new / WEIGHTS)
    if {k: v.shape for k, v in old.items()} != {k: v.shape for k, v in now.items()}:
        return "in shapes: another architecture"
    gaps = {
        name: float((old[name].double() - now[name].double()).abs().max())
        for name in old
        if old[name].numel()
    }
    worst = max(gaps, key=lambda name: gaps[name])
    return f"{gaps[worst]:.3g} in {worst}"
