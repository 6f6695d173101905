"""The callback that writes `checkpoints/last.ckpt` and `checkpoints/best.ckpt`, whole or not at all, and ends a
run that no longer becomes better."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from eagle3lab.config.errors import UserError
from eagle3lab.store.files import sync_directory

from .checkpoint_files import BEST, LAST, PREVIOUS, UNFINISHED, ResumePoint, read_position
from .clock import TrainClock
from .interval_log import IntervalLog
from .milestones import Milestones
from .selection import Selection

ABOUT = "eagle3lab_run"
SELECTION = "eagle3lab_selection"


class Checkpoints(Callback):
    """Saves at the milestones. Which validation is the best, and whether the run ends, is `selection`'s to say.

    `about` is plain data on the run (configuration, provenance) that every checkpoint carries, beside what has
    been selected until then.
    """

    def __init__(
        self,
        directory: Path,
        milestones: Milestones,
        interval_log: IntervalLog,
        clock: TrainClock,
        selection: Selection,
        *,
        resumed: ResumePoint | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self.directory = directory
        self.milestones = milestones
        self.interval_log = interval_log
        self.clock = clock
        self.selection = selection
        self.resumed = resumed
        self.about = dict(about or {})
        self.saved_update = 0
        # a file that this run has neither written nor checked must not take the place of a whole one
        self._last_is_whole = resumed is not None and resumed.path.name == LAST

    @property
    def newest(self) -> Path:
        """The file that holds the weights at hand, when they are saved."""
        if self.resumed is not None and not self._last_is_whole:
            return self.resumed.path
        return self.directory / LAST

    def state_dict(self) -> dict[str, Any]:
        return self.selection.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.selection.load_state_dict(state_dict)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        checkpoint[ABOUT] = self.about
        checkpoint[SELECTION] = self.selection.outcome()

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        # the checkpoint is loaded; where nothing is left to train, no later hook comes
        if self.resumed is not None:
            self.saved_update = pl_module.num_updates
            self.interval_log.write(self.resumed.describe(pl_module.plan))
            self._hold_best_to_its_file()

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.selection.has_stopped:  # before it was resumed
            trainer.should_stop = True

    def _hold_best_to_its_file(self) -> None:
        """Forget a best whose weights are not there: what is said to be selected is what is exported.

        A kill may leave `best.ckpt` one save ahead of `last.ckpt`; further ahead it is where that was damaged.
        """
        best, path = self.selection.best, self.directory / BEST
        if not best:
            return
        try:
            held = read_position(path)["num_updates"]
            found = f"of update {held}" if held != best["update"] else ""
        except UserError as error:
            found = str(error.problems[0].value)
        if found:
            self.interval_log.write(
                f"resume             passed over {path}: {found}, the best was that of update {best['update']:.0f}; "
                "chosen anew from here on"
            )
            self.selection.best = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *args: Any) -> None:
        if not pl_module.update_done or not self.milestones.saves(pl_module.num_updates):
            return
        if trainer.enable_validation and self.milestones.validates(pl_module.num_updates):
            return  # saved after the validation, with its result
        self.save(trainer, pl_module)

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.sanity_checking:  # before the first update
            self.selection.begin(self.interval_log.last_validation)
            return
        is_best = self.selection.take(self.interval_log.last_validation)
        if self.selection.has_stopped:
            trainer.should_stop = True
        self.save(trainer, pl_module, is_best=is_best)

    def save(self, trainer: Trainer, pl_module: Any, *, is_best: bool = False) -> None:
        """Write `last.ckpt`. Whenever this ends, also by a kill, the newest whole file has its name."""
        with self.clock.pause():
            self.directory.mkdir(parents=True, exist_ok=True)
            written, last = self.directory / UNFINISHED, self.directory / LAST
            trainer.save_checkpoint(written)  # on every rank; rank 0 writes
            if trainer.is_global_zero:
                if is_best:
                    _same_file(written, self.directory / BEST)
                if self._last_is_whole and last.is_file():
                    _same_file(last, self.directory / PREVIOUS)
                os.replace(written, last)
                sync_directory(self.directory)
        self._last_is_whole = True
        self.saved_update = pl_module.num_updates


def _same_file(source: Path, target: Path) -> None:
    """Make `target` the same file as `source` under another name, or a copy where links are not to be had."""
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        os.link(source, temporary)
    except OSError:
        shutil.copyfile(source, temporary)
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
    os.replace(temporary, target)
