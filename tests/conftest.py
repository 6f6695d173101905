"""Order of the tests: files that take long go first, so that no process is left alone with one at the end."""

from __future__ import annotations

from pathlib import Path

import pytest

LONG = (
    "cli/test_loop.py",
    "engines/test_vllm_decode.py",
    "cli/test_sweeps.py",
    "cases/test_sweeps.py",
    "distributed/test_two_processes.py",
    "engines/test_vllm_answers.py",
    "engines/test_vllm.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The files of `LONG` in their order, then the others in theirs."""
    tests = Path(__file__).parent
    places = {tests / file: place for place, file in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path, len(places)))
