"""Order of the tests: files that take long go first, so that no process is left alone with one at the end."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from .warm import ROOT, WarmPython

LONG = (
    "cli/test_loop.py",
    "engines/test_vllm_decode.py",
    "cli/test_sweeps.py",
    "cases/test_sweeps.py",
    "distributed/test_two_processes.py",
    "engines/test_vllm_answers.py",
    "engines/test_vllm.py",
    "architectures/test_served.py",
)


@pytest.fixture(scope="session")
def command_environment() -> dict[str, str]:
    """For commands in processes of their own: this one's, with nothing of an outer run in it."""
    variables = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3LAB_", "HYDRA_"))}
    packages = os.pathsep.join(filter(None, (str(ROOT), variables.get("PYTHONPATH"))))
    return {**variables, "OMP_NUM_THREADS": "1", "PYTHONPATH": packages}


@pytest.fixture(scope="session")
def warm_python(command_environment: dict[str, str]) -> Iterator[WarmPython]:
    """Runs commands one after the other; the first waits for the imports of all."""
    python = WarmPython(command_environment)
    yield python
    python.close()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of `LONG` in their order, then the others in theirs."""
    tests = Path(__file__).parent
    places = {tests / file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
