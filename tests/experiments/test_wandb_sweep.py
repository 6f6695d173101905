"""`sweeps/wandb/`: the command that a W&B agent builds is one of train.py's, and the agent's run is the run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command_args

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.schema import SelectBy, WandbConfig, WandbMode
from eagle3lab.config.selection import FIGURES
from eagle3lab.experiments.tracking import build_wandb

from .wandb_files import read_runs

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "sweeps" / "wandb").glob("*.yaml"))
assert FILES, "no sweep of W&B is shipped"


def trials(sweep: dict[str, Any]) -> list[dict[str, Any]]:
    """What the server may ask for: every point of a grid, both ends of an interval."""
    choices = [p.get("values") or [p["min"], p["max"]] for p in sweep["parameters"].values()]
    return [dict(zip(sweep["parameters"], point, strict=True)) for point in itertools.product(*choices)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_command_of_the_agent_composes_and_sets_what_it_says(file: Path) -> None:
    sweep = yaml.safe_load(file.read_text())
    assert file.read_text().startswith(f"# wandb sweep --project eagle3lab sweeps/wandb/{file.name}\n")
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"]["name"] in {FIGURES[by] for by in SelectBy}
    for trial in trials(sweep):
        arguments = create_sweep_command_args({"args": {key: {"value": v} for key, v in trial.items()}})
        words: list[str] = []
        for chunk in sweep["command"]:
            if chunk not in ("${env}", "${interpreter}", "${program}"):
                words += arguments["args_no_hyphens"] if chunk == "${args_no_hyphens}" else [chunk]
        cfg = compose.compose_alone("train", ["model=tiny", "hardware=cpu", *words], CHECKS["train"])
        assert cfg.logger.wandb.mode is WandbMode.online
        for key, value in trial.items():
            if "." in key:
                group, name = key.split(".")
                assert getattr(getattr(cfg, group), name) == value


def test_the_agents_run_is_the_run_and_a_resumed_one_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = WandbConfig(mode=WandbMode.offline)
    monkeypatch.setenv("WANDB_SWEEP_ID", "sweep")
    for agents in ("fromagent", "another"):
        monkeypatch.setenv("WANDB_RUN_ID", agents)
        tracker = build_wandb(settings, run_dir=tmp_path, run_name="r", config={}, tags=[], group=None)
        assert tracker is not None
        tracker.finish({})
    assert [run.run_id for run in read_runs(tmp_path)] == ["fromagent", "fromagent"]
