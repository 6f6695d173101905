"""The callback that writes `checkpoints/last.ckpt` and `checkpoints/best.ckpt`, whole or not at all."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from .clock import TrainClock
from .interval_log import IntervalLog
from .milestones import Milestones

LAST = "last.ckpt"
BEST = "best.ckpt"
MONITOR = "val/simulated_acceptance_length"


class Checkpoints(Callback):
    """Saves at the milestones. Best is the highest simulated acceptance length: the loss falls on when it no
    longer rises."""

    def __init__(
        self, directory: Path, milestones: Milestones, interval_log: IntervalLog, clock: TrainClock
    ) -> None:
        self.directory = directory
        self.milestones = milestones
        self.interval_log = interval_log
        self.clock = clock
        self.best: dict[str, float] = {}  # the figures of the best validation

    def state_dict(self) -> dict[str, Any]:
        return {"best": dict(self.best)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best = dict(state_dict["best"])

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if not pl_module.update_done or not self.milestones.saves(pl_module.num_updates):
            return
        if trainer.enable_validation and self.milestones.validates(pl_module.num_updates):
            return  # saved after the validation, with its result
        self._save(trainer, is_best=False)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        figures = self.interval_log.last_validation
        is_best = not self.best or figures[MONITOR] > self.best[MONITOR]
        if is_best:
            self.best = dict(figures)
        self._save(trainer, is_best=is_best)

    def _save(self, trainer: Trainer, *, is_best: bool) -> None:
        with self.clock.pause():
            self.directory.mkdir(parents=True, exist_ok=True)
            written = self.directory / f".{LAST}.tmp"
            trainer.save_checkpoint(written)  # on every rank; rank 0 writes
            if trainer.is_global_zero:
                _sync(written)
                if is_best:
                    _replace_with_copy(written, self.directory / BEST)
                os.replace(written, self.directory / LAST)
                _sync(self.directory)


def _replace_with_copy(source: Path, target: Path) -> None:
    """Make `target` the same file as `source` under another name, or a copy where links are not to be had."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        _sync(temporary)
    os.replace(temporary, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
