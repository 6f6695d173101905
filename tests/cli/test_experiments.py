"""Every recipe of `conf/experiment/` trains: two updates on the tiny verifier, with the recipe's own settings."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf

from eagle3lab.cli import run_train
from eagle3lab.config import compose
from eagle3lab.config.invocation import Invocation

CONF = compose.config_directory()
RECIPES = sorted(path.stem for path in (CONF / "experiment").glob("*.yaml"))
# what a machine of this size needs; everything else is the recipe's
SMALL = [
    "model=tiny",
    "data=demo",
    "hardware=cpu",
    "train.seq_len=256",
    "train.tokens_per_update=null",
    "train.max_updates=2",
]


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory, so that the first recipe extracts the store and the others find it."""
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("recipes")


def stated(recipe: str) -> dict[str, dict[str, Any]]:
    """Group -> key -> value, as the file states them."""
    content = OmegaConf.to_container(OmegaConf.load(CONF / "experiment" / f"{recipe}.yaml"))
    assert isinstance(content, dict)
    return {str(group): values for group, values in content.items() if group != "defaults"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_makes_two_updates_and_is_what_its_file_says(recipe: str, here: Path) -> None:
    overrides = [f"experiment={recipe}", *SMALL]
    compose.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra_compose("train", overrides=overrides)
    typed, problems = compose.to_typed(cfg, compose.ROOTS["train"])
    assert problems == []
    invocation = Invocation(cwd=here, overrides=tuple(overrides), choices={"experiment": recipe})
    typed.run_dir = str(here / recipe)
    run_train(typed, invocation)

    run = here / recipe
    summary = json.loads((run / "summary.json").read_text())
    assert summary["updates"] == 2
    with (run / "metrics.csv").open(newline="") as f:
        losses = [float(row["train/loss"]) for row in csv.DictReader(f) if row["train/loss"]]
    assert losses
    assert all(map(math.isfinite, losses))
    ran = OmegaConf.load(run / "config.yaml")
    for group, values in stated(recipe).items():
        for key, value in values.items():
            if f"{group}.{key}" not in {w.partition("=")[0] for w in SMALL}:
                assert ran[group][key] == value, f"{group}.{key}"
    exported = json.loads((run / "draft" / "config.json").read_text())
    assert exported["norm_before_residual"] is typed.draft.norm_before_residual
    assert exported["transformer_layer_config"]["model_type"] == typed.draft.layer_type.value
