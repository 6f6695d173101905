"""The tiny verifier's configuration and a store of it, made once."""

from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3lab.config.check import CHECKS
from eagle3lab.config.compose import compose_alone
from eagle3lab.config.schema import Accelerator, Backend, ExtractorConfig, ModelConfig, TrainRoot
from eagle3lab.doctor.check import Check
from eagle3lab.extract.pipeline import extract_store
from eagle3lab.verifier.locate import asset_path


@pytest.fixture(scope="session")
def cfg() -> TrainRoot:
    torch.set_num_threads(1)
    return compose_alone(
        "train", ["model=tiny", "hardware=cpu", "data.max_conversations=12"], CHECKS["train"]
    )


@pytest.fixture(scope="session")
def whole_store(cfg: TrainRoot, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished store of the tiny verifier with several shards. Not to be changed."""
    assert cfg.hardware.accelerator is Accelerator.cpu
    path = tmp_path_factory.mktemp("doctor") / "store"
    extract_store(
        model=cfg.model,
        data=cfg.data,
        extract=ExtractorConfig(backend=Backend.hf, shard_tokens=256),
        hardware=cfg.hardware,
        store=path,
        console=Console(file=io.StringIO()),
    )
    return path


@pytest.fixture
def store(whole_store: Path, tmp_path: Path) -> Path:
    """A copy of the store to damage."""
    return Path(shutil.copytree(whole_store, tmp_path / "store"))


@pytest.fixture
def local_verifier(tmp_path: Path) -> Path:
    """A copy of the tiny verifier to damage."""
    return Path(shutil.copytree(asset_path("tiny"), tmp_path / "verifier"))


@pytest.fixture
def local_model(local_verifier: Path) -> ModelConfig:
    return ModelConfig(name="copy", path=str(local_verifier), aux_layer_ids=[1, 2, 3])


@pytest.fixture
def named() -> Callable[..., Check]:
    """named(checks, name): the one check of that name."""

    def find(checks: list[Check], name: str) -> Check:
        (check,) = [check for check in checks if check.name == name]
        return check

    return find
