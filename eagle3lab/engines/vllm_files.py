"""Hidden states on their way out of vLLM: files in memory, read once, checked and removed. Imports no vllm."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from threading import Condition
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.engines.base import EngineError, States

RAM = Path("/dev/shm")
PREFIX = "eagle3lab-capture-"
OWNER_FILE = "owner.lock"
FILL_SHARE = 0.5  # of the free bytes that one request for states may take
ROOM_SECONDS = 60.0  # for states that are on their way into the store to make room
POLL_SECONDS = 0.1


class Scratch:
    """A directory of this process alone; gone when it is closed, at exit, or at the next start of any run.

    The owner holds a lock on a file inside. A directory whose lock is free was left by a process that was
    killed, and is removed by whoever comes next.
    """

    def __init__(self, directory: Path | None = None) -> None:
        """`directory`: where to make it; default: memory (/dev/shm), else the system's temporary directory."""
        in_memory = RAM.is_dir() and os.access(RAM, os.W_OK)
        parent = directory or (RAM if in_memory else Path(tempfile.gettempdir()))
        try:
            parent.mkdir(parents=True, exist_ok=True)
            remove_abandoned(parent)
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock = os.open(self.path / f"{OWNER_FILE}.new", os.O_CREAT | os.O_WRONLY, 0o600)
        except OSError as error:
            raise _unfit(parent, error, "a directory that can be written, best in memory") from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:  # vLLM could not lock the files of states either
            _remove(self.path, self._lock)
            expected = "a directory of this node whose files can be locked (flock), best in memory"
            raise _unfit(parent, error, expected) from error
        os.rename(self.path / f"{OWNER_FILE}.new", self.path / OWNER_FILE)  # never seen without its lock
        self._room = Condition()
        self._kept = 0  # bytes of rows that are asked for and perhaps not yet written
        self._finalizer = weakref.finalize(self, _remove, self.path, self._lock)

    @contextlib.contextmanager
    def room_for(self, lengths: Sequence[int], bytes_per_token: int) -> Iterator[int]:
        """How many of the first rows may have their states here, together; their room is kept for the block.

        Waits for room that others hold. Raises UserError where the first row does not fit, and where there
        is no room for it after `ROOM_SECONDS`.
        """
        with self._room:
            end = time.monotonic() + ROOM_SECONDS
            while not (count := self._num_that_fit(lengths, bytes_per_token)):
                usage = shutil.disk_usage(self.path)
                needed = lengths[0] * bytes_per_token
                if needed > FILL_SHARE * usage.total or time.monotonic() > end:
                    raise UserError(
                        Problem(
                            f"the states of a row of {lengths[0]:,} tokens need {needed:,} bytes in {self.path.parent}",
                            f"{usage.free:,} bytes free",
                            f"rows within {FILL_SHARE:.0%} of what is free",
                            "extract.scratch_dir=DIRECTORY with more room, or a larger shared memory "
                            "(containers: --shm-size)",
                        )
                    )
                self._room.wait(POLL_SECONDS)
            size = sum(lengths[:count]) * bytes_per_token
            self._kept += size
        try:
            yield count
        finally:
            with self._room:
                self._kept -= size
                self._room.notify_all()

    def _num_that_fit(self, lengths: Sequence[int], bytes_per_token: int) -> int:
        free = shutil.disk_usage(self.path).free - self._kept
        budget = int(free * FILL_SHARE) // bytes_per_token
        return sum(filled <= budget for filled in accumulate(lengths))

    def close(self) -> None:
        """Remove the directory and everything in it."""
        self._finalizer()


def _unfit(parent: Path, error: OSError, expected: str) -> UserError:
    what, fix = "hidden states cannot pass through this directory", "extract.scratch_dir=DIRECTORY"
    return UserError(Problem(what, f"{parent} ({error.strerror})", expected, fix))


def remove_abandoned(parent: Path) -> None:
    """Remove the directories of processes that were killed."""
    for path in parent.glob(f"{PREFIX}*"):
        try:
            descriptor = os.open(path / OWNER_FILE, os.O_WRONLY)
        except OSError:  # of another user, or just being made
            continue
        with contextlib.suppress(OSError):  # locked by its owner, or no file can be locked here
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def take_file(path: Path, seconds: float) -> dict[str, Tensor]:
    """Read a file that the connector may still be writing, and remove it.

    The writer holds `<path>.lock` until the file is whole. The tensors stay valid: they map the pages of
    the removed file.

    Raises:
        EngineError: the writer ended without a file, or is not done within `seconds`.
    """
    lock = Path(f"{path}.lock")
    end = time.monotonic() + seconds
    pause = 0.0005
    while True:
        writing = _is_locked(lock)
        if not writing and path.exists():
            break
        if not writing and lock.exists():
            raise EngineError(f"the connector ended without writing {path.name} (is {path.parent} full?)")
        if time.monotonic() > end:
            raise EngineError(f"no states in {path} after {seconds:,.0f} s")
        time.sleep(pause)
        pause = min(2 * pause, 0.05)
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{path.name} cannot be read: {error}") from error
    finally:
        drop_file(path)


def drop_file(path: Path) -> None:
    """Remove a file of states and its lock, where they are there."""
    path.unlink(missing_ok=True)
    Path(f"{path}.lock").unlink(missing_ok=True)


def file_of(output: Any) -> str | None:
    """Where vLLM writes the states of an answered request, if it does."""
    return (output.kv_transfer_params or {}).get("hidden_states_path")


def drop_files(files: Iterable[str | None]) -> None:
    """Remove files of states that nobody will read."""
    for file in filter(None, files):
        drop_file(Path(file))


def to_states(
    tensors: dict[str, Tensor], captured_ids: Sequence[int], layer_ids: Sequence[int], hidden_size: int
) -> States:
    """One row of the connector, {hidden_states [T, n, hidden], token_ids [T]}, as `States`.

    `captured_ids` are the n ids in the ascending order in which the connector always writes them; the last
    of them is the state after the last layer, before the norm.

    Raises:
        IntegrityError: another number of layers or another width: nothing is guessed from a part of it.
    """
    hidden = tensors.get("hidden_states")
    token_ids = tensors.get("token_ids")
    shape = None if hidden is None else tuple(hidden.shape)
    if hidden is None or token_ids is None or hidden.dim() != 3 or hidden.shape[1:] != (
        len(captured_ids),
        hidden_size,
    ):  # fmt: skip
        raise IntegrityError(
            Problem(
                "vLLM returned states of another form",
                shape if token_ids is not None else sorted(tensors),
                f"[tokens, {len(captured_ids)} layers, {hidden_size}] with their token ids",
                "extract.backend=hf, or another release of vllm",
            )
        )
    slots = [captured_ids.index(k) for k in layer_ids]
    leading = slots == list(range(len(slots)))
    aux = hidden[:, : len(slots)] if leading else hidden[:, slots]  # a view where the order allows it
    return States(token_ids.to(torch.int64), aux.reshape(len(hidden), -1), hidden[:, -1])


def _is_locked(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _remove(path: Path, lock: int) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.close(lock)
