"""One rank of tiny training runs, one after the other: `torchrun ... train_tiny.py '[{"store": ...}, ...]'`.

`"fail": [rank, update, how]` in a job ends that rank then: by a mistake of the user's (`error`), or with its torchrun as
when its node dies (`kill`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from lightning.pytorch.loggers.logger import DummyLogger

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import (
    LossConfig,
    Normalisation,
    OptimKind,
    Strategy,
    TrainerConfig,
    TrainingStep,
)
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_state import load_weights
from eagle3lab.training.peers import together
from eagle3lab.training.sharding import own_part
from eagle3lab.training.trainer import fit
from eagle3lab.under_hydra import exit_with


def load_tiny() -> ModuleType:
    path = Path(__file__).parents[1] / "training" / "tiny_run.py"
    spec = importlib.util.spec_from_file_location("tiny_run", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["tiny_run"] = module
    spec.loader.exec_module(module)
    return module


def slow_measure(weights: Mapping[str, torch.Tensor]) -> tuple[int, tuple[int, ...]]:
    """An acceptance that depends on the weights, after a while in which the other rank waits."""
    time.sleep(0.5)
    return 1000, tuple(int(100 * (k + sum(t.double().sum() for t in weights.values()) % 1)) for k in range(3))


class FailAt(DummyLogger):
    def __init__(self, update: int, how: str) -> None:
        super().__init__()
        self.update, self.how = update, how

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step != self.update or "train/loss" not in metrics:
            return
        if self.how == "error":
            raise UserError("a file of this node cannot be read")
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def run(tiny: ModuleType, job: dict[str, Any]) -> None:
    out = Path(job["out"])
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, **job["train"])
    train.acceptance.every_updates = job.get("measure_every")
    train.early_stopping.patience = job.get("patience")
    optim = dict(job.get("optim", {}))
    optim["kind"] = OptimKind(optim.get("kind", "adamw"))
    module, data = tiny.build(
        StoreReader(Path(job["store"])),
        train,
        devices=job["devices"],
        nodes=job.get("nodes", 1),
        noise=job.get("noise", 0.0),
        threads=job.get("threads", 0),
        optim=tiny.optim(**optim),
        step=TrainingStep(job.get("step", "reference")),
        loss=LossConfig(step_decay=0.8, normalisation=Normalisation(job.get("normalisation", "token"))),
    )
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    fail = job.get("fail")
    summary = fit(
        module,
        data,
        hardware=tiny.hardware(
            job["devices"], Strategy(job.get("strategy", "auto")), nodes=job.get("nodes", 1)
        ),
        train=train,
        run_dir=out,
        resume=job.get("resume", False),
        resume_command="train_tiny.py",
        loggers=[FailAt(*fail[1:])] if fail and fail[0] == rank else [],
        # only the first rank has a verifier
        measure_acceptance=slow_measure if rank == 0 else None,
    )
    if module.global_rank == 0:
        torch.save(tiny.weights(module), out / "weights.pt")
        assert load_weights(module.draft, out / "checkpoints" / "last.ckpt") == summary.updates
        torch.save(tiny.weights(module), out / "exported.pt")
        states = [state for o in module.trainer.optimizers for state in o.state.values()]
        held = sum(own_part(t).numel() for state in states for t in state.values() if t.ndim)
        (out / "summary.json").write_text(json.dumps(summary.to_json() | {"optimizer_values_held": held}))


if __name__ == "__main__":
    tiny_run = load_tiny()
    try:
        for each in json.loads(sys.argv[1]):
            with together():
                run(tiny_run, each)
    except UserError as error:
        exit_with(error)
