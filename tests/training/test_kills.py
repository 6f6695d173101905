"""kill -9 while a checkpoint is written: what is resumed is what was never interrupted, to the last bit."""

from __future__ import annotations

import importlib.util
import random
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3lab.config.names import CHECKPOINTS
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_files import LAST, PREVIOUS, fault_of

NONE = {"weights": 0.0, "optimizer": 0.0, "logged": 0.0}


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "resume_figures", Path(__file__).with_name("resume_figures.py")
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["resume_figures"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def setting(figures: ModuleType, tiny: ModuleType, store: StoreReader) -> Any:
    return figures.Setting(tiny, store)


@pytest.fixture(scope="module")
def whole(setting: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole")
    setting.run(path)
    return path


def test_a_kill_before_any_step_of_a_save_loses_no_more_than_that_save(
    figures: ModuleType, setting: Any, whole: Path, tmp_path: Path
) -> None:
    # from the second save on: torch.save, fsync, link, rename, rename, fsync of the directory
    starts = []
    for number in range(figures.FIRST_SAVE_CALLS, figures.FIRST_SAVE_CALLS + 7):
        path = tmp_path / str(number)
        assert figures.killed_before_call(setting, path, number)
        checkpoints = path / CHECKPOINTS
        assert fault_of(checkpoints / LAST) is None
        assert not (checkpoints / PREVIOUS).exists() or fault_of(checkpoints / PREVIOUS) is None
        start, differences = figures.resumed(setting, whole, path)
        starts.append(start)
        assert differences == NONE
    assert starts == sorted(starts)
    assert len(set(starts)) > 1


@pytest.mark.parametrize(("save", "share"), [(2, 0.0), (5, 0.4), (12, 0.99)])
def test_a_kill_inside_the_file_leaves_the_checkpoint_before(
    figures: ModuleType, setting: Any, whole: Path, tmp_path: Path, save: int, share: float
) -> None:
    figures.killed_inside_the_file(setting, tmp_path, save, share)
    assert figures.what_is_left(tmp_path) == "inside the file"
    start, differences = figures.resumed(setting, whole, tmp_path)
    assert start == save - 1
    assert differences == NONE


def test_kills_at_random_moments_of_a_save(
    figures: ModuleType, setting: Any, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng, moments, worst = random.Random(1), Counter[str](), dict(NONE)
    for number in range(12):
        path = tmp_path / str(number)
        if not figures.killed_during_a_save(setting, path, rng) or not (path / CHECKPOINTS / LAST).exists():
            continue
        moments[figures.what_is_left(path)] += 1
        _, differences = figures.resumed(setting, whole, path)
        worst = {name: max(worst[name], value) for name, value in differences.items()}
        if sum(moments.values()) == 4:
            break
    with capsys.disabled():
        print(f"\n{sum(moments.values())} kills {dict(moments)}, largest difference {worst}")
    assert sum(moments.values()) == 4
    assert worst == NONE


def test_a_difference_would_be_seen(figures: ModuleType, setting: Any, whole: Path, tmp_path: Path) -> None:
    setting.run(tmp_path)
    file = tmp_path / CHECKPOINTS / LAST
    checkpoint = torch.load(file, weights_only=True)
    checkpoint["state_dict"]["draft.norm.weight"][3] += 1e-7
    torch.save(checkpoint, file)
    assert 0 < figures.differences(whole, tmp_path)["weights"] < 1e-6
