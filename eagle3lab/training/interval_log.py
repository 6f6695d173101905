"""The callback that turns sums into figures, for the loggers, the console and the choice of checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError

from .clock import TrainClock, peak_memory_gib
from .console import interval_line, validation_line
from .datamodule import Eagle3DataModule
from .metrics import train_figures, validation_figures
from .milestones import Milestones
from .module import Eagle3Module


class IntervalLog(Callback):
    """Logs at the milestones, asks Lightning for validation at the plan's updates, and measures speed.

    Between milestones nothing waits for the device. Raises `UserError` when the loss or a gradient is not
    finite and `IntegrityError` when the supervised tokens counted are not the planned ones.
    """

    def __init__(self, milestones: Milestones, clock: TrainClock, write: Callable[[str], None]) -> None:
        self.milestones = milestones
        self.clock = clock
        self.write = write
        self.last_train: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}
        self.wait_seconds = 0.0
        self.train_seconds = 0.0
        self.peak_memory_gib = 0.0
        self.measured_from: tuple[int, float] | None = None  # updates and seconds after the first interval
        self._flushed = (0, 0.0)  # updates and training seconds at the last log
        self._waited = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        module: Eagle3Module = pl_module
        self.clock.restart()
        self._flushed = (module.num_updates, 0.0)
        module.train_sums.reset()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: Any, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        module: Eagle3Module = pl_module
        due = module.update_done and self.milestones.validates(module.num_updates)
        # Lightning validates after the batch whose number this divides; infinity: only after the run's last
        trainer.val_check_batch = batch_idx + 1 if due else math.inf
        if module.update_done and self.milestones.logs(module.num_updates):
            self._log_interval(trainer, module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.clock.stop()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        module: Eagle3Module = pl_module
        figures = validation_figures(module.validation_sums.reduce(), module.step_decay)
        self.last_validation = self._log(trainer, module, figures)
        self.write(validation_line(self.last_validation, module.plan.num_updates))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.clock.go_on()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.peak_memory_gib = peak_memory_gib(pl_module.device)  # the module leaves its device after this

    def _log(self, trainer: Trainer, module: Eagle3Module, figures: dict[str, float]) -> dict[str, float]:
        update = module.num_updates
        figures = {"update": update, "tokens": module.plan.tokens_after(update), **figures}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=update)
        return figures

    def _log_interval(self, trainer: Trainer, module: Eagle3Module) -> None:
        sums = module.train_sums.reduce()  # waits for the device
        before, seconds_before = self._flushed
        update, seconds = module.num_updates, self.clock.seconds()
        self._check(sums, module, before)
        module.train_sums.reset()
        module.num_planned_supervised = [0] * module.ttt_steps
        elapsed = max(seconds - seconds_before, 1e-9)
        tokens = module.plan.tokens_after(update) - module.plan.tokens_after(before)
        waited = self._waited_since()
        figures = {
            **train_figures(sums),
            "train/learning_rate": module.learning_rate(update - 1),
            "speed/tokens_per_second": tokens / elapsed,
            "speed/supervised_tokens_per_second": sums["supervised_step"][0] / elapsed,
            "speed/data_wait_share": min(1.0, waited / elapsed),
            "speed/peak_memory_gib": peak_memory_gib(module.device),
        }
        self._flushed, self.train_seconds = (update, seconds), seconds
        if self.measured_from is None:
            self.measured_from = self._flushed
        self.wait_seconds += waited
        self.last_train = self._log(trainer, module, figures)
        acceptance = self.last_validation.get("val/simulated_acceptance_length")
        plan = module.plan
        self.write(interval_line(self.last_train, plan.num_updates, plan.num_tokens, acceptance))

    def _waited_since(self) -> float:
        loader = self._data.train_loader
        total = loader.wait_seconds if loader is not None else 0.0
        waited, self._waited = total - self._waited, total
        return waited

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        self._data: Eagle3DataModule = trainer.datamodule

    def _check(self, sums: dict[str, list[float]], module: Eagle3Module, before: int) -> None:
        where = f"between updates {before} and {module.num_updates - 1}"
        if not all(map(math.isfinite, (*sums["loss"], *sums["grad_norm"]))):
            raise UserError(
                Problem(
                    f"the loss or a gradient became NaN or infinite {where}",
                    f"loss {sums['loss'][0]:g}, gradient norm {sums['grad_norm'][0]:g} (sums)",
                    "finite values; the checkpoints written before hold",
                    f"optim.lr={module.optim.lr / 3:.1e}, or optim.grad_clip_norm=0.5",
                )
            )
        if [round(n) for n in sums["supervised_step"]] != module.num_planned_supervised:
            raise IntegrityError(
                Problem(
                    f"the supervised tokens trained {where} are not those the losses were divided by",
                    sums["supervised_step"],
                    str(module.num_planned_supervised),
                )
            )
