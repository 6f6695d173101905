"""SIGTERM in training: the update is finished, everything is saved, and the run says how to go on."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Callback, Trainer

from eagle3lab.config.errors import Problem, StoppedBySignal

from .checkpoints import Checkpoints
from .interval_log import IntervalLog

# the second is what `sbatch --signal=USR1@90` sends ahead of the first
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class StopOnSignal(Callback):
    """Comes after the other callbacks. Raises `StoppedBySignal` between two updates, on all ranks at the same.

    One process stops after the update at hand. Several agree where they talk to each other anyway, at the
    next logging interval; a signal to any one of them is enough. A run that has made its last update, or stops
    early, is left to end.

    Lightning's own handlers are replaced while training: for SIGTERM they start a collective inside the
    handler, wherever that rank happens to be; under SLURM, SIGUSR1 writes a checkpoint of their own in
    mid-update, which a later start would prefer to ours, and requeues the job. Its teardown puts the handlers
    of before back.
    """

    def __init__(self, interval_log: IntervalLog, checkpoints: Checkpoints, resume_command: str) -> None:
        self.interval_log = interval_log
        self.checkpoints = checkpoints
        self.resume_command = resume_command
        self._received: str | None = None

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return  # only the main thread may have handlers

        def received(number: int, frame: FrameType | None) -> None:
            self._received = signal.Signals(number).name
            pl_module.stop_requested = True

        for number in SIGNALS:
            signal.signal(number, received)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not pl_module.update_done:
            return
        if trainer.enable_validation and self.checkpoints.milestones.validates(pl_module.num_updates):
            return  # asked after the validation
        self._stop_if_asked(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self._stop_if_asked(trainer, pl_module)

    def _stop_if_asked(self, trainer: Trainer, module: Any) -> None:
        asked = module.stop_requested if trainer.world_size == 1 else self.interval_log.stop_agreed
        if not asked or trainer.should_stop or module.num_updates == module.plan.num_updates:
            return
        self.interval_log.log_interval(trainer, module)
        if self.checkpoints.saved_update != module.num_updates:
            self.checkpoints.save(trainer, module)
        raise StoppedBySignal(
            Problem(
                f"stopped by {self._received or 'a signal to another process of the run'} after update "
                f"{module.num_updates} of {module.plan.num_updates}; everything is saved in "
                f"{self.checkpoints.directory}",
                fix=self.resume_command,
            )
        )
