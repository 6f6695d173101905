"""One writer per store: the lock on its directory, and what an interrupted writer left in it."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.store.answers import ANSWERS_FILE
from eagle3lab.store.files import TEMPORARY_SUFFIX
from eagle3lab.store.index import SHARD_DIRECTORY
from eagle3lab.store.manifest import MANIFEST_FILE, is_store


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[list[str]]:
    """Create the store's directory and lock it for this process; yields notes for the user.

    Raises UserError when `path` holds something that is no store, or when another process writes it.
    """
    path.mkdir(parents=True, exist_ok=True)
    ours = {MANIFEST_FILE + TEMPORARY_SUFFIX, SHARD_DIRECTORY}
    ours |= {ANSWERS_FILE, ANSWERS_FILE + TEMPORARY_SUFFIX}
    if (path / ANSWERS_FILE).is_file():  # answers come before the manifest, and lost ones are logged
        ours.add("logs")
    foreign = sorted(entry.name for entry in path.iterdir() if entry.name not in ours)
    if foreign and not is_store(path):
        raise UserError(
            Problem(
                f"{path} is neither a store nor an empty directory; it holds",
                value=foreign[:3],
                fix="store=ANOTHER_DIRECTORY",
            )
        )
    (path / SHARD_DIRECTORY).mkdir(exist_ok=True)
    notes: list[str] = []
    problem = Problem(
        f"another process is writing the store {path}", fix="wait for it, or store=ANOTHER_DIRECTORY"
    )
    with locked(path, problem) as is_locked:
        if not is_locked:
            notes.append(f"{path} cannot be locked: do not write it from two processes")
        yield notes


@contextlib.contextmanager
def locked(path: Path, taken: Problem) -> Iterator[bool]:
    """Lock a directory for this process; yields False where directories cannot be locked.

    Raises UserError with `taken` when another process holds it. The lock of a process that is killed is gone.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_locked = True
        except BlockingIOError as error:
            raise UserError(taken) from error
        except OSError:
            is_locked = False  # some network file systems do not; the renames still keep files whole
        yield is_locked
    finally:
        # unlocked explicitly: a child process may still hold a copy of the descriptor
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


def remove_leftovers(path: Path) -> list[str]:
    """Delete the temporary files of an interrupted writer; returns a note for each."""
    notes = []
    for directory in (path, path / SHARD_DIRECTORY):
        for leftover in sorted(directory.glob(f"*{TEMPORARY_SUFFIX}")):
            leftover.unlink()
            notes.append(f"removed {leftover.name}, left by an interrupted run")
    return notes
