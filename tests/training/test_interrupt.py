"""A signal ends a run between two updates, with everything saved, and with Lightning's own handling out of the way."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers.logger import DummyLogger

from eagle3lab.config.errors import StoppedBySignal
from eagle3lab.config.schema import TrainerConfig
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_files import read_position


class SignalAt(DummyLogger):
    """Sends this process a signal when a training interval or a validation of this update is logged."""

    def __init__(self, update: int, number: int = signal.SIGTERM, key: str = "train/loss") -> None:
        super().__init__()
        self.update, self.number, self.key = update, number, key

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step == self.update and self.key in metrics:
            os.kill(os.getpid(), self.number)


def config(tiny: ModuleType, **fields: Any) -> TrainerConfig:
    values = {"tokens_per_update": 2 * tiny.SEQ_LEN, "max_epochs": 2, "log_every_updates": 1} | fields
    return TrainerConfig(seq_len=tiny.SEQ_LEN, **values)


def equal(tiny: ModuleType, one: Any, two: Any) -> bool:
    first, second = tiny.weights(one), tiny.weights(two)
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(scope="module")
def whole(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    return train_run(store, tmp_path_factory.mktemp("whole"), config(tiny), noise=0.05)[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_update_at_hand_is_finished_and_saved_and_the_run_goes_on_from_it(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, whole: Any, number: int
) -> None:
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)]
    with pytest.raises(StoppedBySignal, match=signal.Signals(number).name) as stopped:
        train_run(store, tmp_path, config(tiny), noise=0.05, loggers=(SignalAt(2, number),))
    assert stopped.value.exit_code == 143
    assert "resume=true" in str(stopped.value)
    assert read_position(tmp_path / "checkpoints" / "last.ckpt")["num_updates"] == 2
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1)] == handlers
    module, summary = train_run(store, tmp_path, config(tiny), noise=0.05, resume=True)
    assert summary.resumed_from_update == 2
    assert equal(tiny, module, whole)


def test_in_a_validation_it_waits_for_its_end_and_keeps_the_result(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, whole: Any
) -> None:
    with pytest.raises(StoppedBySignal, match="after update 4 of 8"):
        train_run(store, tmp_path, config(tiny), noise=0.05, loggers=(SignalAt(4, key="val/loss"),))
    assert (tmp_path / "checkpoints" / "best.ckpt").is_file()
    module, _ = train_run(store, tmp_path, config(tiny), noise=0.05, resume=True)
    assert equal(tiny, module, whole)


def test_between_logs_the_interval_so_far_is_logged(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eagle3lab.training.module import Eagle3Module

    original = Eagle3Module.training_step

    def step(self: Any, batch: Any, batch_idx: int) -> None:
        if self.num_updates == 1 and self._micro_batch == 0:  # in the middle of update 2
            os.kill(os.getpid(), signal.SIGTERM)
        original(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(Eagle3Module, "training_step", step)
        with pytest.raises(StoppedBySignal, match="after update 2 of 8"):
            train_run(store, tmp_path, config(tiny, log_every_updates=100))
    assert len((tmp_path / "metrics.csv").read_text().splitlines()) == 3
    train_run(store, tmp_path, config(tiny, log_every_updates=100), resume=True)
    updates = [line.split(",")[0] for line in (tmp_path / "metrics.csv").read_text().splitlines()[1:]]
    assert updates == ["0", "2", "4", "4", "8", "8"]  # two rows where a validation follows


def test_a_run_that_has_made_its_last_update_is_left_to_end(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    _, summary = train_run(store, tmp_path, config(tiny), loggers=(SignalAt(8),))
    assert summary.updates == 8


def test_under_slurm_nothing_is_requeued_and_no_other_checkpoint_is_written(
    tiny: ModuleType,
    store: StoreReader,
    train_run: Any,
    tmp_path: Path,
    whole: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lightning's handler would save `hpc_ckpt_1.ckpt`, which a later start prefers, and call scontrol."""
    job = {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_PROCID": "0"}
    job |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NTASKS_PER_NODE": "1"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(subprocess, "call", lambda *_, **__: pytest.fail("requeued"))
    monkeypatch.setattr(
        "lightning.pytorch.trainer.connectors.signal_connector.call", lambda *_, **__: pytest.fail("requeued")
    )
    with pytest.raises(StoppedBySignal, match="SIGUSR1"):
        train_run(store, tmp_path, config(tiny), noise=0.05, loggers=(SignalAt(3, signal.SIGUSR1),))
    assert not list(tmp_path.rglob("hpc_ckpt*"))
    module, summary = train_run(store, tmp_path, config(tiny), noise=0.05, resume=True)
    assert summary.resumed_from_update == 3
    assert equal(tiny, module, whole)
