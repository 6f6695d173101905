"""What a repetition of a run says differs, on run directories that a test writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from omegaconf import OmegaConf
from safetensors.numpy import save_file

from eagle3lab.commands.rerun import _largest_difference
from eagle3lab.config import compose
from eagle3lab.config.errors import UserError
from eagle3lab.experiments import rerun


def write(run_dir: Path, *, metrics: str = "update,train/loss,speed/mfu\n1,2.5,0.1\n", weight: float = 1.0,
          **provenance: Any) -> Path:  # fmt: skip
    """A finished run whose configuration is that of `train.py model=tiny hardware=cpu noise=uniform0.05`."""
    compose.register()
    with initialize_config_dir(str(compose.config_directory()), version_base="1.3"):
        words = ["model=tiny", "hardware=cpu", "noise=uniform0.05", "run_name='price \\${PRICE}'"]
        cfg = hydra_compose("train", overrides=words)
    typed, problems = compose.to_typed(cfg, compose.ROOTS["train"])
    assert problems == []
    typed.store, typed.run_dir = "/stores/tiny", str(run_dir)
    (run_dir / "draft").mkdir(parents=True)
    (run_dir / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.structured(typed)))
    said = {
        "choices": {"model": "tiny", "noise": "uniform0.05", "hardware": "cpu", "draft": "gone"},
        "overrides": ["model=tiny", "draft=gone", "noise=uniform0.05", "+data.role_map={a: user}", "store=there"],
        "versions": {"torch": "2.13.0"}, "git": {"commit": "a" * 40, "dirty": False}, "python": "3.11",
        "store": {"manifest_hash": "m"},
    } | provenance  # fmt: skip
    (run_dir / "provenance.json").write_text(json.dumps(said))
    (run_dir / "summary.json").write_text("{}")
    (run_dir / "metrics.csv").write_text(metrics)
    save_file({"a": np.zeros(2), "b": np.array([weight])}, run_dir / "draft" / "model.safetensors")
    return run_dir


def test_the_stored_configuration_composes_to_itself(tmp_path: Path) -> None:
    run, new = write(tmp_path / "run"), tmp_path / "new"
    words = rerun.write_primary(run, new, Path("/stores/tiny"))
    # the group whose option is gone, and the places of the first command, come from the file alone
    assert words == [
        "-cd", str(new), "-cn", "rerun", "model=tiny", "noise=uniform0.05", "++data.role_map={a: user}",
    ]  # fmt: skip
    with initialize_config_dir(str(new), version_base="1.3"):
        where = f"hydra.searchpath=[file://{compose.config_directory()}]"
        cfg = hydra_compose("rerun", overrides=[where, *words[4:6]])
    typed, problems = compose.to_typed(cfg, compose.ROOTS["train"])
    assert problems == []
    stored = yaml.safe_load((run / "config.yaml").read_text())
    again = yaml.safe_load(OmegaConf.to_yaml(OmegaConf.structured(typed)))
    assert again["run_dir"] == str(new)
    assert typed.run_name == "price ${PRICE}"
    assert {k: v for k, v in again.items() if k not in ("run_dir", "run_name")} == {
        k: v for k, v in stored.items() if k not in ("run_dir", "run_name")
    }


def test_every_kind_of_difference_is_said(tmp_path: Path) -> None:
    old = write(tmp_path / "old")
    same = write(tmp_path / "same", metrics="update,train/loss,speed/mfu\n1,2.5,0.7\n")
    assert rerun.differing_configuration(old, same) == rerun.differing_environment(old, same) == {}
    assert rerun.differing_metrics(old, same) == (1, {})  # a timing is none
    assert rerun.weights_sha256(old) == rerun.weights_sha256(same)
    other = write(
        tmp_path / "other", metrics="update,train/loss,speed/mfu\n1,2.75,0.1\n2,1,0.1\n", weight=1.5,
        versions={"torch": "2.14.0"}, git={"commit": "b" * 40, "dirty": False}, hardware={"cpu": "new"},
    )  # fmt: skip
    assert rerun.differing_environment(old, other) == {
        "git.commit": ("a" * 40, "b" * 40),
        "versions.torch": ("2.13.0", "2.14.0"),
        "hardware.cpu": (None, "new"),
    }
    assert rerun.differing_metrics(old, other) == (1, {"number of rows": float("inf"), "train/loss": 0.25})
    assert rerun.weights_sha256(old) != rerun.weights_sha256(other)
    assert _largest_difference(old, other) == "0.5 in b"
    config = (other / "config.yaml").read_text().replace("scale: 0.05", "scale: 0.06")
    (other / "config.yaml").write_text(config)
    assert rerun.differing_configuration(old, other) == {"noise.scale": (0.05, 0.06)}


def test_what_cannot_be_repeated_is_one_message(tmp_path: Path) -> None:
    run = write(tmp_path / "run")
    with pytest.raises(UserError, match="the store of the run is missing or unfinished: '/stores/tiny'"):
        rerun.require_repeatable(run)
    (run / "summary.json").unlink()
    with pytest.raises(UserError, match=r"no finished training run to repeat: it lacks summary\.json"):
        rerun.require_repeatable(run)
