"""Writing files so that a final name always means a whole file, by one process, and a full disk is said plainly."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from eagle3lab.config.errors import IntegrityError, Problem, UserError

TEMPORARY_SUFFIX = ".tmp"
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# safetensors reports the errno of a failed write only inside its message
_OS_ERROR = re.compile(r"\(os error (\d+)\)")

_MAKE_ROOM = (
    "free space or choose another store=DIRECTORY, then run the same command again: "
    "every shard in the index stays valid and is not written again"
)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, fsync it and rename it to `path`.

    Raises UserError when the disk is full; the temporary file is removed then.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with disk_errors(path):
            write(temporary)
            with open(temporary, "rb") as file:
                os.fsync(file.fileno())
            os.replace(temporary, path)
            sync_directory(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: Path, data: bytes) -> None:
    """`write_atomically` for bytes."""
    write_atomically(path, lambda temporary: temporary.write_bytes(data))


def write_text(path: Path, text: str) -> None:
    """`write_atomically` for a text."""
    write_bytes(path, text.encode())


def append_durably(path: Path, data: bytes) -> None:
    """Add `data` to the end of a file and fsync it; when that fails the file is cut back to what it was.

    Raises UserError when the disk is full.
    """
    # unbuffered: what a full disk refused must not be tried again when the file is closed
    with disk_errors(path), open(path, "ab", buffering=0) as file:
        before = file.tell()
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
            os.fsync(file.fileno())
        except BaseException:
            os.ftruncate(file.fileno(), before)
            raise


def sync_directory(path: Path) -> None:
    """Make a rename inside `path` survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sha256_of(path: Path) -> str:
    """Hex sha256 of a file's bytes. Raises IntegrityError when the file is missing."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise IntegrityError(Problem(f"{path} is missing")) from error


@contextlib.contextmanager
def disk_errors(
    path: Path, expected: str = "room on that disk for the whole store", fix: str = _MAKE_ROOM
) -> Iterator[None]:
    """Turn "no space", "quota exceeded" and "file too large" into a UserError that names `path`."""
    try:
        yield
    except Exception as error:
        number = _errno_of(error)
        if number not in _NO_SPACE:
            raise
        raise UserError(
            Problem(
                f"cannot write {path} (errno {number}, {os.strerror(number)})",
                expected=expected,
                fix=fix,
            )
        ) from error


def _errno_of(error: BaseException) -> int | None:
    if isinstance(error, OSError):
        return error.errno
    if isinstance(error.__context__, OSError):  # torch.save meets the failed write while closing its archive
        return error.__context__.errno
    found = _OS_ERROR.search(str(error))
    return int(found[1]) if found else None


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
