"""The doctor's part that concerns `extract.py` and `train.py`, run by them at start; seconds, not minutes."""

from __future__ import annotations

import gc
import importlib.util
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import Accelerator, Backend, ExtractorConfig, HardwareConfig

from .check import Check, Status
from .libraries import LAYER as SYMBOLS
from .libraries import check_symbols
from .packages import check_packages
from .resources import check_resources
from .symbols import LIBRARIES, files_of

DISK_MIB = 8
MODE_VARIABLE = "EAGLE3LAB_DOCTOR"  # "warn": failures are printed and the run goes on


def before_extraction(extract: ExtractorConfig, hardware: HardwareConfig, store: Path) -> str:
    """What `extract.py` prints at its start, for resolved `hardware`; see `preflight`."""
    # decided without engines.select, whose imports are among the symbols to be checked
    automatic = extract.backend is Backend.auto and hardware.accelerator is Accelerator.cuda
    if extract.backend is Backend.vllm or (automatic and importlib.util.find_spec("vllm") is not None):
        # even a single engine has a worker process and hands states over through memory
        workers = hardware.engine.tensor_parallel * hardware.engine.data_parallel
        return preflight("extract", store, num_processes=workers + 1)
    return preflight("extract", store, num_processes=1, without=("vllm",))


def before_training(hardware: HardwareConfig, run_dir: Path) -> str:
    """What `train.py` prints at its start, for resolved `hardware`; see `preflight`."""
    return preflight("train", run_dir, num_processes=hardware.num_devices or 1, without=("vllm",))


def preflight(command: str, directory: Path, *, num_processes: int, without: Sequence[str] = ()) -> str:
    """Packages, the symbols that `command` uses, shared memory and disk; returns what to print.

    directory: where the output goes. without: libraries that this run does not touch.
    Raises UserError with every failure; warnings are part of the text. The libraries are imported here
    for the symbols, and the run finds them imported.
    """
    start = time.perf_counter()
    with _collector_at_rest():
        checks = list(_checks(command, directory, num_processes, without))
    failures = [check for check in checks if check.status is Status.fail]
    if failures and os.environ.get(MODE_VARIABLE) != "warn":
        problems = [
            Problem(f"doctor: {c.name}: {c.found}", fix=c.remedy.replace("\n", " or ")) for c in failures
        ]
        regardless = (
            f"{problems[-1].fix}\n         {MODE_VARIABLE}=warn in the environment goes on regardless"
        )
        raise UserError(*problems[:-1], replace(problems[-1], fix=regardless))
    notes = [c for c in checks if c.status is not Status.ok]
    num_ok = len(checks) - len(notes)
    imports = sum(check.seconds for check in checks if check.layer == SYMBOLS)
    own = time.perf_counter() - start - imports
    lines = [
        f"doctor: {num_ok} checks ok ({own:.1f} s, and {imports:.1f} s of imports that the run needs anyway)"
    ]
    lines += [f"doctor: {c.status.value}: {c.name}: {c.found}\n    try: {c.remedy}" for c in notes]
    return "\n".join(lines)


@contextmanager
def _collector_at_rest() -> Iterator[None]:
    """Without Python's collector: what imports make stays, and to walk it over and over takes a sixth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _checks(command: str, directory: Path, num_processes: int, without: Sequence[str]) -> Iterator[Check]:
    libraries = [library for library in LIBRARIES if library not in without]
    yield from check_packages()
    yield from check_symbols(files_of(command), libraries=libraries)
    yield from check_resources(directory, num_processes=num_processes, disk_mib=DISK_MIB)
