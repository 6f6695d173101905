"""`fit`: one run of a module over a plan with Lightning's trainer, from start or checkpoint to a summary."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, Strategy

from eagle3lab.config import schema
from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.config.flops import StepWork
from eagle3lab.config.names import CHECKPOINTS, METRICS
from eagle3lab.config.schema import Accelerator, HardwareConfig, Precision, TrainerConfig
from eagle3lab.config.stamp import is_rank_zero

from .checkpoint_files import BEST, PlainFiles, find_resume_point
from .checkpoints import Checkpoints
from .clock import TrainClock
from .csv_log import CsvLog
from .datamodule import Eagle3DataModule
from .interrupt import StopOnSignal
from .interval_log import IntervalLog
from .metrics import metric_names
from .milestones import Milestones
from .module import Eagle3Module
from .peers import agree, set_resume_command
from .real_acceptance import Measure, RealAcceptance
from .replicas import meet_in, num_replicas
from .roofline import Speedometer, find_limit
from .selection import Selection
from .sharding import ShardedStrategy
from .summary import TrainingSummary


class RunProgressBar(RichProgressBar):
    """Lightning's bar, without the number of the Lightning epoch: there is only one."""

    def _get_train_description(self, current_epoch: int) -> str:
        return "packs"


class MeetOthers(Callback):
    """Where this command starts its other processes itself, they exist from here on."""

    def setup(self, trainer: Trainer, pl_module: Any, stage: str) -> None:
        if trainer.world_size == 1 or not meet_in(trainer.strategy.cluster_environment):
            return
        for thread in threading.enumerate():
            if isinstance(thread, _ChildProcessObserver):  # kills this process, too, before it can say why
                thread._run = lambda: True


def fit(
    module: Eagle3Module,
    datamodule: Eagle3DataModule,
    *,
    hardware: HardwareConfig,
    train: TrainerConfig,
    run_dir: Path,
    loggers: Sequence[Logger] = (),
    resume: bool = False,
    resume_command: str = "the same command with resume=true",
    about: Mapping[str, Any] | None = None,
    needed_flops: Callable[[StepWork], float] | None = None,
    seconds_before: float = 0.0,
    measure_acceptance: Measure | None = None,
) -> TrainingSummary:
    """Train `module` over its plan on `hardware` (resolved), writing metrics and checkpoints under `run_dir`.

    Runs in every process: under torchrun or SLURM as it is, else Lightning starts the other ranks by running
    the same command again. Afterwards the module holds the last weights; `checkpoint_state.load_weights`
    fetches the best. With `resume` the run goes on from `checkpoints/last.ckpt`, or from the one before where
    that is damaged; a complete run does no more. `about` (plain data) goes into every checkpoint. `needed_flops`
    turns the work that the data module counts into FLOPs, for the MFU. `seconds_before`: what the command took
    until here, for the summary. `measure_acceptance` decodes for `train.acceptance`, on the first rank.

    Raises `UserError` when there is nothing to resume, when the checkpoint's data or update size is another,
    when validations are asked for without rows, when a loss is not finite, and when a checkpoint cannot be
    written; `StoppedBySignal`, naming `resume_command`, after a SIGTERM.
    """
    began = time.perf_counter() - seconds_before
    plan = module.plan
    assert num_replicas(hardware) == plan.num_replicas, "the plan was made for other hardware"
    validate = datamodule.num_validation_rows > 0
    if not validate:
        _refuse_what_needs_validation(train)
    num_drafted = (train.acceptance.k or module.ttt_steps) if train.acceptance.every_updates else 0
    real = RealAcceptance(num_drafted, measure_acceptance) if num_drafted else None
    directory = run_dir / CHECKPOINTS
    point = find_resume_point(directory) if resume else None
    start = point.num_updates if point else 0
    agree({"checkpoint": f"{point.path.name} of update {start}" if point else "none"})

    milestones, clock = Milestones.of(plan, train), TrainClock()
    selection = Selection(train.select_by, train.early_stopping)
    columns = [
        *metric_names(module.ttt_steps, datamodule.domain_names, num_drafted),
        *datamodule.noise_figures,
    ]
    csv_log = CsvLog(run_dir / METRICS, columns, keep_until=start)
    speed = Speedometer(plan.num_replicas, hardware.peak_tflops, needed_flops)
    log = IntervalLog(milestones, clock, print_line, speed, real)
    checkpoints = Checkpoints(directory, milestones, log, clock, selection, resumed=point, about=about)
    set_resume_command(lambda: resume_command if checkpoints.saved_update else "")
    with quiet_lightning():
        trainer = build_trainer(
            hardware,
            run_dir,
            loggers=[csv_log, *loggers],
            callbacks=[MeetOthers(), log, checkpoints, StopOnSignal(log, checkpoints, resume_command)],
            validate=validate,
            validate_untrained=train.validate_untrained and point is None,
        )
        trainer.fit(
            module,
            datamodule=datamodule,
            ckpt_path=point.path if point else None,
            weights_only=resume or None,
        )
    if module.num_updates == 0:
        raise UserError(Problem("no update was made", f"{plan.num_updates} were planned", "at least one"))
    return _summary(module, log, checkpoints, hardware, start=start, began=began)


def _refuse_what_needs_validation(train: TrainerConfig) -> None:
    keys = [
        key
        for key, value in (
            ("train.early_stopping.patience", train.early_stopping.patience),
            ("train.acceptance.every_updates", train.acceptance.every_updates),
        )
        if value is not None
    ]
    raise_all(
        [Problem(f"{key} is set, but the store has no validation rows", fix=f"{key}=null") for key in keys]
    )


def build_trainer(
    hardware: HardwareConfig,
    run_dir: Path,
    *,
    loggers: list[Logger],
    callbacks: list[Any],
    validate: bool,
    validate_untrained: bool = False,
) -> Trainer:
    """Lightning's trainer. One Lightning epoch is the whole run: epochs, updates and resuming are the plan's."""
    trainer = Trainer(
        accelerator="gpu" if hardware.accelerator is Accelerator.cuda else "cpu",
        devices=hardware.num_devices,
        num_nodes=hardware.num_nodes,
        strategy=_strategy(hardware),
        precision="bf16-mixed" if hardware.precision is Precision.bf16 else "32-true",
        logger=loggers,
        plugins=[PlainFiles()],
        callbacks=[*callbacks, RunProgressBar()] if sys.stdout.isatty() else callbacks,
        max_epochs=1,
        limit_val_batches=1.0 if validate else 0,
        num_sanity_val_steps=-1 if validate_untrained else 0,  # -1: all of it
        inference_mode=False,  # what the first forward keeps is used in training
        use_distributed_sampler=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=sys.stdout.isatty(),
        default_root_dir=run_dir,
    )
    # Lightning asks all ranks for a received SIGTERM before every batch, and waits for the device to do so;
    # here they agree when they log (`StopOnSignal`).
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None
    return trainer


def _strategy(hardware: HardwareConfig) -> Strategy | str:
    if hardware.strategy is schema.Strategy.auto and hardware.num_devices == 1 and hardware.num_nodes == 1:
        return "auto"
    backend = "nccl" if hardware.accelerator is Accelerator.cuda else "gloo"
    if hardware.strategy is schema.Strategy.fsdp2:
        return ShardedStrategy(num_replicas(hardware), backend)
    # Lightning wraps the module under a stream of its own, and there gradients are added and summed: it is meant
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    # the draft's buffers never change, so nothing needs to be sent before a forward
    return DDPStrategy(process_group_backend=backend, broadcast_buffers=False, gradient_as_bucket_view=True)


def _summary(
    module: Eagle3Module,
    log: IntervalLog,
    checkpoints: Checkpoints,
    hardware: HardwareConfig,
    *,
    start: int,
    began: float,
) -> TrainingSummary:
    seconds = time.perf_counter() - began
    plan, steady, pauses = module.plan, log.speed.steady, log.clock.paused_seconds() + log.untrained_seconds
    mfu = steady.mfu(hardware.peak_tflops)
    limit = find_limit(
        steady,
        first_seconds=max(0.0, seconds - steady.seconds - pauses),
        pause_seconds=pauses,
        peak_tflops=hardware.peak_tflops,
        peak_memory_gib=log.peak_memory_gib,
        device_memory_gib=hardware.device_memory_gib,
    )
    return TrainingSummary(
        updates=module.num_updates,
        epochs=plan.num_epochs,
        tokens=plan.tokens_after(module.num_updates),
        resumed_from_update=start,
        seconds=seconds,
        train_seconds=log.train_seconds,
        tokens_per_second=steady.per_second(steady.tokens),
        supervised_tokens_per_second=steady.per_second(steady.supervised),
        mfu=mfu,
        needed_tflops_per_device=steady.needed_tflops,
        data_wait_share=steady.wait_share,
        read_gb_per_second=steady.per_second(steady.bytes_read * plan.num_replicas) / 1e9,
        peak_memory_gib=log.peak_memory_gib,
        first_update_seconds=log.first_update_at - began if log.first_update_at else None,
        limited_by=limit.name,
        limit=str(limit),
        num_replicas=plan.num_replicas,
        micro_batches_per_update=plan.micro_batches,
        last=log.last_train,
        last_validation=log.last_validation,
        best_validation=checkpoints.selection.best,
        selection=checkpoints.selection.outcome(),
        last_checkpoint=str(checkpoints.newest),
        best_checkpoint=str(checkpoints.directory / BEST) if checkpoints.selection.best else None,
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
