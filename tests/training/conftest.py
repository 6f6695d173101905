from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.schema import TrainerConfig
from eagle3lab.store.reader import StoreReader
from eagle3lab.training import module as training_module
from eagle3lab.training.trainer import fit


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    """tiny_run.py as a module."""
    torch.set_num_threads(1)
    spec = importlib.util.spec_from_file_location("tiny_run", Path(__file__).with_name("tiny_run.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_run"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def store(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    return tiny.write_store(tmp_path_factory.mktemp("store") / "store", tiny.default_rows())


@pytest.fixture(scope="session")
def train_run(tiny: ModuleType) -> Any:
    """Build and fit in one call; returns the module and the summary."""

    def run(
        store: StoreReader,
        run_dir: Path,
        train: TrainerConfig,
        *,
        resume: bool = False,
        loggers: tuple[Any, ...] = (),
        **build: Any,
    ) -> Any:
        module, data = tiny.build(store, train, **build)
        summary = fit(
            module,
            data,
            hardware=tiny.hardware(),
            train=train,
            run_dir=run_dir,
            loggers=loggers,
            resume=resume,
        )
        return module, summary

    return run


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """Every update's gradients before clipping, in order, from the module's own call."""
    seen: list[dict[str, Tensor]] = []
    original = training_module.Eagle3Module._step

    def step(self: Any) -> Tensor:
        seen.append({n: p.grad.clone() for n, p in self.draft.named_parameters() if p.grad is not None})
        return original(self)

    monkeypatch.setattr(training_module.Eagle3Module, "_step", step)
    return seen
