"""`fit`: one run of a module over a plan with Lightning's trainer, from start or checkpoint to a summary."""

from __future__ import annotations

import logging
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy

from eagle3lab.config import schema
from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import Accelerator, HardwareConfig, Precision, TrainerConfig
from eagle3lab.config.stamp import is_rank_zero

from .checkpoint_state import read_position
from .checkpoints import BEST, LAST, Checkpoints
from .clock import TrainClock
from .csv_log import CsvLog
from .datamodule import Eagle3DataModule
from .interval_log import IntervalLog
from .metrics import metric_names
from .milestones import Milestones
from .module import Eagle3Module
from .replicas import num_replicas
from .summary import TrainingSummary

METRICS_FILE = "metrics.csv"
CHECKPOINTS = "checkpoints"


class RunProgressBar(RichProgressBar):
    """Lightning's bar, without the number of the Lightning epoch: there is only one."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "packs"


def fit(
    module: Eagle3Module,
    datamodule: Eagle3DataModule,
    *,
    hardware: HardwareConfig,
    train: TrainerConfig,
    run_dir: Path,
    loggers: Sequence[Logger] = (),
    resume: bool = False,
) -> TrainingSummary:
    """Train `module` over its plan on `hardware` (resolved), writing metrics and checkpoints under `run_dir`.

    Runs in every process: under torchrun or SLURM as it is, else Lightning starts the other ranks by running
    the same command again. Afterwards the module holds the last weights; `checkpoint_state.load_weights`
    fetches the best. With `resume` the run goes on from `checkpoints/last.ckpt`; a complete one does no more.

    Raises `UserError` when there is nothing to resume, when the checkpoint's data or update size is another,
    and when a loss is not finite.
    """
    began = time.perf_counter()
    plan = module.plan
    assert num_replicas(hardware) == plan.num_replicas, "the plan was made for other hardware"
    directory = run_dir / CHECKPOINTS
    last = directory / LAST
    start = _resumed_update(last) if resume else 0

    milestones, clock = Milestones.of(plan, train), TrainClock()
    csv_log = CsvLog(run_dir / METRICS_FILE, metric_names(module.ttt_steps), keep_until=start)
    log = IntervalLog(milestones, clock, write=print_line)
    checkpoints = Checkpoints(directory, milestones, log, clock)
    with quiet_lightning():
        trainer = build_trainer(
            hardware,
            run_dir,
            loggers=[csv_log, *loggers],
            callbacks=[log, checkpoints],
            validate=datamodule.num_validation_rows > 0,
        )
        trainer.fit(
            module, datamodule=datamodule, ckpt_path=last if resume else None, weights_only=resume or None
        )
    if module.num_updates == 0:
        raise UserError(Problem("no update was made", f"{plan.num_updates} were planned", "at least one"))
    return _summary(module, log, checkpoints, start=start, seconds=time.perf_counter() - began)


def build_trainer(
    hardware: HardwareConfig, run_dir: Path, *, loggers: list[Logger], callbacks: list[Any], validate: bool
) -> Trainer:
    """Lightning's trainer. One Lightning epoch is the whole run: epochs, updates and resuming are the plan's."""
    trainer = Trainer(
        accelerator="gpu" if hardware.accelerator is Accelerator.cuda else "cpu",
        devices=hardware.num_devices,
        num_nodes=hardware.num_nodes,
        strategy=_strategy(hardware),
        precision="bf16-mixed" if hardware.precision is Precision.bf16 else "32-true",
        logger=loggers,
        callbacks=[*callbacks, RunProgressBar()] if sys.stdout.isatty() else callbacks,
        max_epochs=1,
        limit_val_batches=1.0 if validate else 0,
        num_sanity_val_steps=0,
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
        default_root_dir=run_dir,
    )
    # Lightning asks all ranks for a received SIGTERM before every batch, and waits for the device to do so.
    # Launchers signal every rank, and each rank looks at its own signal after every batch.
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def _strategy(hardware: HardwareConfig) -> Strategy | str:
    if hardware.strategy is schema.Strategy.auto and hardware.num_devices == 1 and hardware.num_nodes == 1:
        return "auto"
    backend = "nccl" if hardware.accelerator is Accelerator.cuda else "gloo"
    # the draft's buffers never change, so nothing needs to be sent before a forward
    return DDPStrategy(process_group_backend=backend, broadcast_buffers=False, gradient_as_bucket_view=True)


def _resumed_update(last: Path) -> int:
    if not last.is_file():
        raise UserError(
            Problem("nothing to resume: no checkpoint", str(last), "a run that has saved one", "resume=false")
        )
    return int(read_position(last)["num_updates"])


def _summary(
    module: Eagle3Module, log: IntervalLog, checkpoints: Checkpoints, *, start: int, seconds: float
) -> TrainingSummary:
    plan, train_seconds = module.plan, log.train_seconds
    first_update, first_second = log.measured_from or (start, 0.0)
    if first_update == module.num_updates:  # a single interval: there is nothing else to measure
        first_update, first_second = start, 0.0
    tokens = plan.tokens_after(module.num_updates) - plan.tokens_after(first_update)
    measured = train_seconds - first_second
    return TrainingSummary(
        updates=module.num_updates,
        epochs=plan.num_epochs,
        tokens=plan.tokens_after(module.num_updates),
        resumed_from_update=start,
        seconds=seconds,
        train_seconds=train_seconds,
        tokens_per_second=tokens / measured if measured > 0 else 0.0,
        data_wait_share=log.wait_seconds / train_seconds if train_seconds > 0 else 0.0,
        peak_memory_gib=log.peak_memory_gib,
        num_replicas=plan.num_replicas,
        micro_batches_per_update=plan.micro_batches,
        last=log.last_train,
        last_validation=log.last_validation,
        best_validation=checkpoints.best,
        last_checkpoint=str(checkpoints.directory / LAST),
        best_checkpoint=str(checkpoints.directory / BEST) if checkpoints.best else None,
    )


def print_line(text: str) -> None:
    """One line on rank 0, at once: a log file shows how far the run is."""
    if is_rank_zero():
        print(text, flush=True)


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's remarks about hardware, workers and modes out of the log; warnings of others stay."""
    names = ("lightning.pytorch", "lightning.fabric", "lightning")
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"lightning\..*")
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*in eval mode at the start of training.*")
            yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
