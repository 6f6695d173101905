"""The callback that turns sums into figures, for the loggers, the console and the choice of checkpoints."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError

from .clock import TrainClock, peak_memory_gib, wait_for_device
from .console import interval_line, validation_line
from .datamodule import Eagle3DataModule
from .metrics import SIMULATED, domain_figures, train_figures, validation_figures
from .milestones import Milestones
from .module import Eagle3Module
from .real_acceptance import RealAcceptance
from .roofline import Speedometer, Stretch


class IntervalLog(Callback):
    """Logs at the milestones, asks Lightning for validation at the plan's updates, and measures speed.

    Between milestones nothing waits for the device. Raises `UserError` when the loss or a gradient is not
    finite and `IntegrityError` when a state that was read is not, or when the supervised tokens counted are not
    the planned ones.
    """

    def __init__(
        self,
        milestones: Milestones,
        clock: TrainClock,
        write: Callable[[str], None],
        speed: Speedometer,
        real_acceptance: RealAcceptance | None = None,
    ) -> None:
        self.milestones = milestones
        self.clock = clock
        self.write = write
        self.speed = speed
        self.real_acceptance = real_acceptance
        self.last_train: dict[str, float] = {}
        self.last_validation: dict[str, float] = {}
        self.first_update_at: float | None = None  # time.perf_counter() when it was done
        self.train_seconds = 0.0
        self.untrained_seconds = 0.0  # of the validation before the first update
        self.peak_memory_gib = 0.0
        self.stop_agreed = False  # a rank was told to end the run, as of the last interval
        self._flushed = (0, 0.0)  # updates and training seconds at the last log

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
        if module.update_done and self.first_update_at is None:
            wait_for_device(module.device)  # once: the first update compiles
            self.first_update_at = time.perf_counter()
        if module.update_done and self.milestones.logs(module.num_updates):
            self.log_interval(trainer, module)

    def on_validation_start(self, trainer: Trainer, pl_module: Any) -> None:
        self.clock.stop()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        module: Eagle3Module = pl_module
        if self._data.validation_loader is not None:
            self._data.validation_loader.finish_check()
        sums, by_domain = module.validation_sums.reduce_groups()
        figures = validation_figures(sums, module.step_decay)
        domains = self._data.domain_names
        if domains:
            figures |= domain_figures(domains, by_domain, module.step_decay)
        if self.real_acceptance is not None and self.milestones.decodes(module.num_updates):
            figures |= self.real_acceptance.figures(module.draft)
        self.last_validation = self._log(trainer, module, figures)
        self.write(validation_line(self.last_validation, module.plan.num_updates, domains))

    def on_validation_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.clock.go_on()

    def on_sanity_check_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.untrained_seconds = self.clock.paused_seconds()

    def on_train_end(self, trainer: Trainer, pl_module: Any) -> None:
        self.peak_memory_gib = peak_memory_gib(pl_module.device)  # the module leaves its device after this

    def _log(self, trainer: Trainer, module: Eagle3Module, figures: dict[str, float]) -> dict[str, float]:
        update = module.num_updates
        figures = {"update": update, "tokens": module.plan.tokens_after(update), **figures}
        for logger in trainer.loggers:
            logger.log_metrics(figures, step=update)
        return figures

    def log_interval(self, trainer: Trainer, module: Eagle3Module) -> None:
        """Log the updates since the last interval, if there are any. On every rank at the same update."""
        if module.num_updates == self._flushed[0]:
            return
        loader = self._data.train_loader
        assert loader is not None
        loader.finish_check()  # a damaged state also makes the loss NaN, and is the better explanation
        sums = module.train_sums.reduce()  # waits for the device
        before, seconds_before = self._flushed
        update, seconds = module.num_updates, self.clock.seconds()
        self._check(sums, module, before)
        self.stop_agreed = sums["stop_requests"][0] > 0
        module.train_sums.reset()
        module.num_planned_supervised = [0] * module.ttt_steps
        trained = Stretch(
            seconds=seconds - seconds_before,
            updates=update - before,
            tokens=module.plan.tokens_after(update) - module.plan.tokens_after(before),
            supervised=sums["supervised_step"][0],
        )
        figures = {
            **train_figures(sums),
            "train/learning_rate": module.learning_rate(update - 1),
            **self.speed.interval(trained, loader),
            "speed/peak_memory_gib": peak_memory_gib(module.device),
            **self._data.noise_figures,
        }
        self._flushed, self.train_seconds = (update, seconds), seconds
        self.last_train = self._log(trainer, module, figures)
        acceptance = self.last_validation.get(SIMULATED)
        plan = module.plan
        self.write(interval_line(self.last_train, plan.num_updates, plan.num_tokens, acceptance))

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
