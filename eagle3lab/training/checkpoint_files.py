"""Checkpoint files: written straight to disk, checked before they are used, and which one to go on from."""

from __future__ import annotations

import os
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.store.files import disk_errors

from .run_plan import RunPlan

LAST = "last.ckpt"
PREVIOUS = "previous.ckpt"  # the one before, for when `last.ckpt` turns out damaged
BEST = "best.ckpt"
UNFINISHED = f".{LAST}.tmp"
KEY = "eagle3lab"


class PlainFiles(TorchCheckpointIO):
    """Writes into the file itself. Lightning's own way holds the bytes twice in memory, and in /tmp meanwhile."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write and fsync, here and now: there is no background save whose failure could go unseen.

        Raises `UserError` when the disk is full; no other file is touched then.
        """
        path = Path(path)
        fix = (
            f"free space, then the same command with resume=true run_dir={path.parent.parent}: "
            "the checkpoints written before hold"
            if (path.parent / LAST).is_file()
            else "free space, then the same command in another run_dir: nothing was saved yet"
        )
        try:
            with (
                disk_errors(path, "room for one checkpoint more", fix),
                open(path, "wb") as file,
            ):
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise


def fault_of(path: Path) -> str | None:
    """What is damaged in a checkpoint file, in one phrase; None for a whole one.

    `torch.save` writes a checksum (CRC-32) of every tensor, and `torch.load` does not look at them.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            record = archive.testzip()
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, NotImplementedError, RuntimeError) as error:
        return str(error) or type(error).__name__
    return None if record is None else f"{record} in it does not have its checksum"


def _damaged(path: Path, fault: str) -> IntegrityError:
    return IntegrityError(Problem(f"the checkpoint {path} is damaged", fault, "a whole file"))


def read_position(path: Path) -> dict[str, Any]:
    """The place of a checkpoint: `num_updates`, `tokens`, `epoch`, ...

    Raises `IntegrityError` for a damaged file and `UserError` for a file that is no checkpoint of eagle3lab.
    """
    if (fault := fault_of(path)) is not None:
        raise _damaged(path, fault)
    expected, fix = "a checkpoint written by train.py", ""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True, mmap=True)[KEY])
    except Exception as error:
        # of the archive's directory, where Python's own reader is less strict
        if "failed reading zip archive" in str(error):
            raise _damaged(path, str(error).partition(". This is an internal")[0]) from error
        # torch names the first class; nothing of it was imported or run
        found = str(error).partition("Unsupported global: GLOBAL ")[2].split(" ", 1)[0]
        reason = f"it holds pickled objects ({found})" if found else f"{type(error).__name__}: {error}"
        if found:
            expected = "tensors and plain data alone; there is no option to load anything else"
            fix = (
                "where you trust the file: torch.serialization.safe_globals([...]) in a script of yours, that "
                "saves it anew with OmegaConf.to_container(...) in place of the configuration"
            )
        raise UserError(Problem(f"cannot use {path}", reason.splitlines()[0], expected, fix)) from error


@dataclass(frozen=True)
class ResumePoint:
    """The newest whole checkpoint of a run, and what was passed over to get to it."""

    path: Path
    position: dict[str, Any]
    passed_over: tuple[str, ...]

    @property
    def num_updates(self) -> int:
        return int(self.position["num_updates"])

    def describe(self, plan: RunPlan) -> str:
        """Where the run goes on, and what is left of it; for a checkpoint that was held against `plan`."""
        done = plan.find(self.position["epoch"], self.position["in_epoch"])
        saved_on = self.position.get("num_replicas")
        devices = (
            f"the same remaining rows in the same order, saved on {saved_on} devices and now on {plan.num_replicas}"
            if saved_on not in (None, plan.num_replicas)
            else "the same remaining rows in the same order"
        )
        lines = [f"resume             {text}" for text in self.passed_over]
        lines += [
            f"resume             {self.path}: {done:,} of {plan.num_updates:,} updates made",
            f"                   left: {plan.rows_after(plan.num_updates) - plan.rows_after(done):,} rows, "
            f"{plan.num_tokens - plan.tokens_after(done):,} tokens; {devices}",
        ]
        return "\n".join(lines)


def find_resume_point(directory: Path) -> ResumePoint:
    """`last.ckpt` of a run, or the one before where it is damaged.

    Raises `UserError` when there is no whole checkpoint: a run is never begun anew without being told to.
    """
    passed_over = []
    if (directory / UNFINISHED).exists():
        passed_over.append(f"passed over {directory / UNFINISHED}: a save that did not end")
    for name in (LAST, PREVIOUS):
        path = directory / name
        if not path.is_file():
            passed_over.append(f"passed over {path}: it is not there")
            continue
        try:
            return ResumePoint(path, read_position(path), tuple(passed_over))
        except IntegrityError as error:
            problem = error.problems[0]
            passed_over.append(f"passed over {path}: damaged, {problem.value}")
    raise UserError(
        Problem(
            "nothing to resume: no whole checkpoint in",
            str(directory),
            "a run that has saved one",
            "another run_dir, without resume=true",
        ),
        *passed_over,
    )
