"""A working directory with the commands in it, and the tiny verifier's store and one trained run, made once."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ..warm import ROOT, WarmPython

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def run_command(
    tmp_path_factory: pytest.TempPathFactory, warm_python: WarmPython, command_environment: dict[str, str]
) -> Run:
    """Run `COMMAND.py ARGS` as a user does; returns the finished process. The directory is the session's."""
    directory = tmp_path_factory.mktemp("work")

    def run(
        command: str, *arguments: str, expect: int = 0, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        words = [str(ROOT / command), *arguments]
        done = warm_python.run(words, cwd=directory, env={**command_environment, **environment}, timeout=300)
        assert done.returncode == expect, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        return done

    run.directory = directory  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="session")
def workspace(run_command: Run) -> Path:
    """The directory that `run_command` runs in."""
    return run_command.directory  # type: ignore[attr-defined,no-any-return]


@pytest.fixture(scope="session")
def trained(run_command: Run, workspace: Path) -> Path:
    """The run directory of `train.py model=tiny hardware=cpu noise=uniform0.05`, in a fresh directory."""
    run_command(
        "train.py", "model=tiny", "hardware=cpu", "noise=uniform0.05", "train.seq_len=512", "optim.lr=3e-3",
        "optim.lr_warmup_updates=3", "logger=wandb_offline", "run_dir=first",
    )  # fmt: skip
    return workspace / "first"
