"""CKP cases on files of real runs: what is chosen, what is refused, what a failed save leaves."""

from __future__ import annotations

import io
import runpy
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from case_run import Run, config, expected, largest_difference, logged

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import OptimConfig, Schedule, TrainerConfig
from eagle3lab.training.checkpoint_files import LAST, PREVIOUS, UNFINISHED, find_resume_point, read_position
from eagle3lab.config.names import CHECKPOINTS

from ..training.tiny_run import Stop, StopAt

CASES = Path(__file__).parent


def test_ckp_02_the_rate_goes_on_where_it_was(run_of: Callable[..., Run], tmp_path: Path) -> None:
    case = expected("CKP-02")
    optim = OptimConfig(lr=1e-3, schedule=Schedule.linear, lr_warmup_updates=4)
    run = run_of("TRN-12", "row", validation=["row"])
    train = config(max_updates=10, validate_every_updates=3, save_every_updates=1)
    at = case["resume_at"]
    with pytest.raises(Stop):
        run(tmp_path, train, optim=optim, loggers=(StopAt(at + 1),))
    before = torch.load(tmp_path / CHECKPOINTS / LAST, weights_only=True)
    shutil.copytree(tmp_path / CHECKPOINTS, tmp_path / "longer" / CHECKPOINTS)
    assert read_position(tmp_path / CHECKPOINTS / LAST)["num_updates"] == case["step_counter"]
    _, summary = run(tmp_path, train, optim=optim, resume=True)
    rates = logged(tmp_path, "train/learning_rate")
    assert rates[at:] == pytest.approx(case["lr_next_updates"], abs=1e-7)
    best = before["callbacks"]
    kept = next(state["best"] for state in best.values() if "best" in state)
    assert (
        summary.best_validation["val/simulated_acceptance_length"] >= kept["val/simulated_acceptance_length"]
    )
    # a longer run follows its own table from here, with the optimizer state it has
    module, _ = run(tmp_path / "longer", replace(train, max_updates=20), optim=optim, resume=True)
    table = [1e-3 * (20 - u) / 16 for u in range(at, 20)]
    assert logged(tmp_path / "longer", "train/learning_rate") == pytest.approx(table, abs=1e-9)
    state = module.optimizers().optimizer.state_dict()["state"][0]
    assert int(state["step"]) == 20


@pytest.fixture
def three_saves(run_of: Callable[..., Run], tmp_path: Path) -> tuple[Run, TrainerConfig, Path]:
    """A run of TRN-12's row that was stopped after its third save; its store and configuration."""
    run, train = run_of("TRN-12", "row"), config(max_updates=5, save_every_updates=1)
    with pytest.raises(Stop):
        run(tmp_path / "run", train, noise=0.05, loggers=(StopAt(4),))
    return run, train, tmp_path / "run"


def test_ckp_03_the_newest_whole_checkpoint_is_chosen_and_said(
    three_saves: tuple[Run, TrainerConfig, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The case's step_40 is a save that did not end, step_30 a cut file, step_20 the one before."""
    run, train, path = three_saves
    whole, _ = run(tmp_path / "whole", train, noise=0.05)
    last = path / CHECKPOINTS / LAST
    content = last.read_bytes()
    last.write_bytes(content[: len(content) // 2])
    (path / CHECKPOINTS / UNFINISHED).write_bytes(content[:999])
    with pytest.raises(IntegrityError, match=r"last\.ckpt is damaged"):
        read_position(last)
    capsys.readouterr()
    module, summary = run(path, train, noise=0.05, resume=True)
    said = capsys.readouterr().out
    assert summary.resumed_from_update == 2
    assert f"passed over {last}: damaged" in said
    assert f"passed over {path / CHECKPOINTS / UNFINISHED}: a save that did not end" in said
    assert f"resume             {path / CHECKPOINTS / PREVIOUS}: 2 of 5 updates made" in said
    assert "left: 3 rows, 33 tokens; the same remaining rows in the same order" in said
    assert largest_difference(module, whole) == 0.0
    assert read_position(last)["num_updates"] == 5
    assert read_position(path / CHECKPOINTS / PREVIOUS)["num_updates"] == 4


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_ckp_03_without_a_whole_checkpoint_nothing_is_begun_anew(
    three_saves: tuple[Run, TrainerConfig, Path], damage: str
) -> None:
    run, train, path = three_saves
    for name in (LAST, PREVIOUS):
        file = path / CHECKPOINTS / name
        content = bytearray(file.read_bytes())
        if damage == "cut":
            del content[len(content) // 3 :]
        else:  # in the middle of a tensor, where torch.load sees nothing
            content[len(content) // 2] ^= 4
            file.unlink()
        file.write_bytes(content)
        if damage == "bit":
            torch.load(file, weights_only=True)
    with pytest.raises(UserError) as refused:
        run(path, train, resume=True)
    assert all(f"{name}: damaged" in str(refused.value) for name in (LAST, PREVIOUS))
    assert (damage == "bit") == ("does not have its checksum" in str(refused.value))


def test_ckp_04_a_save_that_fails_ends_the_run_and_leaves_the_one_before(
    run_of: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The case's storage writes a third of the second save, then the disk is full."""
    storage = runpy.run_path(str(CASES / "CKP-04" / "failing_storage.py"))["FailingStorage"]()
    save = torch.save

    def failing(content: Any, file: Any) -> None:
        blob = io.BytesIO()
        save(content, blob)
        storage.save(file.name, blob.getvalue())

    monkeypatch.setattr(torch, "save", failing)
    run, train = run_of("TRN-12", "row"), config(max_updates=3, save_every_updates=1)
    with pytest.raises(UserError, match="errno 28") as refused:
        run(tmp_path, train)
    assert "resume=true" in str(refused.value)
    assert [p.name for p in (tmp_path / CHECKPOINTS).iterdir()] == [LAST]
    assert find_resume_point(tmp_path / CHECKPOINTS).num_updates == 1
    monkeypatch.setattr(torch, "save", save)
    module, _ = run(tmp_path, train, resume=True)
    whole, _ = run(tmp_path / "whole", train)
    assert largest_difference(module, whole) == 0.0


def test_ckp_07_a_checkpoint_is_plain_data_and_objects_in_one_are_named(
    three_saves: tuple[Run, TrainerConfig, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, train, path = three_saves
    last = path / CHECKPOINTS / LAST
    content = torch.load(last, weights_only=True)
    assert content["eagle3lab"]["ttt_input_tokens"] == "ground_truth"  # TRN-15: the source, by name
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["make", str(last)])
    runpy.run_path(str(CASES / "CKP-07" / "make_hparams_checkpoint.py"))
    with pytest.raises(UserError) as refused:
        run(path, train, resume=True)
    assert "omegaconf.dictconfig.DictConfig" in str(refused.value)
    assert "safe_globals" in str(refused.value)
