"""One writer per store: the lock on its directory, and what an interrupted writer left in it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.store.answers import ANSWERS_FILE
from eagle3lab.store.files import TEMPORARY_SUFFIX, locked
from eagle3lab.store.index import SHARD_DIRECTORY
from eagle3lab.store.manifest import MANIFEST_FILE, is_store


@contextlib.contextmanager
def claimed(path: Path) -> Iterator[list[str]]:
    """Create the store's directory and lock it for this process; yields notes for the user.

    Raises UserError when `path` holds something that is no store, or when another process writes it.
    """
    path.mkdir(parents=True, exist_ok=True)
    refuse_foreign(path)
    (path / SHARD_DIRECTORY).mkdir(exist_ok=True)
    notes: list[str] = []
    problem = Problem(
        f"another process is writing the store {path}", fix="wait for it, or store=ANOTHER_DIRECTORY"
    )
    with locked(path, problem) as is_locked:
        if not is_locked:
            notes.append(f"{path} cannot be locked: do not write it from two processes")
        yield notes


def refuse_foreign(path: Path) -> None:
    """Raise UserError when the directory `path` holds something that is no store's."""
    if not path.is_dir():
        return
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


def remove_leftovers(path: Path) -> list[str]:
    """Delete the temporary files of an interrupted writer; returns a note for each."""
    notes = []
    for directory in (path, path / SHARD_DIRECTORY):
        for leftover in sorted(directory.glob(f"*{TEMPORARY_SUFFIX}")):
            leftover.unlink()
            notes.append(f"removed {leftover.name}, left by an interrupted run")
    return notes
