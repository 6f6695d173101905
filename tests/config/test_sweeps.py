"""A sweep says its command and is in the table; the command line replaces its axes (that all compose: test_conf_files)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import DictConfig

from eagle3lab.config import compose
from eagle3lab.config.sweep_grid import trials_of

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in (ROOT / "sweeps").glob("*.yaml"))
SEARCH = f"hydra.searchpath=[file://{compose.config_directory()}]"


@contextmanager
def sweep(name: str) -> Iterator[DictConfig]:
    """The composed configuration of a sweep, its `hydra` node included."""
    pytest.importorskip("hydra_plugins.hydra_optuna_sweeper")
    compose.register()
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        yield hydra_compose(name, overrides=["model=tiny", "hardware=cpu", SEARCH], return_hydra_config=True)


@pytest.mark.parametrize("name", NAMES)
def test_a_sweep_says_its_command_and_is_in_the_table(name: str) -> None:
    first = (ROOT / "sweeps" / f"{name}.yaml").read_text().splitlines()[0]
    assert first == f"# python train.py -cd sweeps -cn {name} model=tiny hardware=cpu"
    row = next(r for r in (ROOT / "sweeps/README.md").read_text().splitlines() if f"`{name}.yaml`" in r)
    with sweep(name) as config:
        trials, whole = trials_of(config)
    said = [int(n) for n in re.findall(r"\d+", row.split("|")[3])]
    product = said[0] * (said[1] if len(said) > 1 else 1)
    assert product == (len(trials) if whole else config.hydra.sweeper.n_trials)


def test_an_axis_of_the_command_line_replaces_the_file_s() -> None:
    compose.register()
    with initialize_config_dir(str(ROOT / "sweeps"), version_base="1.3"):
        overrides = ["model=tiny", "train.seed=7", SEARCH]
        config = hydra_compose("ttt", overrides=overrides, return_hydra_config=True)
        trials, whole = trials_of(config)
    assert whole
    assert [t for t in trials if "train.seed=7" not in t] == []
    assert len(trials) == 4


@pytest.mark.parametrize(("entry", "tasks", "nodes"), [("train", 8, 2), ("extract", 1, 1)])
def test_slurm_starts_a_task_for_every_device_of_training_and_one_for_a_part(
    entry: str, tasks: int, nodes: int
) -> None:
    compose.register()
    overrides = ["launcher=submitit", "hardware=hopper8", "hardware.num_nodes=2"]
    with initialize_config_dir(str(compose.config_directory()), version_base="1.3"):
        cfg = hydra_compose(entry, overrides=overrides, return_hydra_config=True)
    launcher = cfg.hydra.launcher
    assert (launcher.tasks_per_node, launcher.nodes, launcher.gpus_per_node) == (tasks, nodes, 8)
