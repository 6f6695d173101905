from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from . import known_pairs
from .known_pairs import Pair


@pytest.fixture(scope="session")
def successor() -> Callable[[int], int]:
    return known_pairs.successor


@pytest.fixture(scope="session")
def succ_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return known_pairs.make_succ_pair(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="session")
def one_right_draft(succ_pair: Pair) -> Any:
    return known_pairs.make_one_right(succ_pair)


@pytest.fixture(scope="session")
def perfect_draft(succ_pair: Pair) -> Any:
    return known_pairs.make_perfect(succ_pair)


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return known_pairs.make_random_pair(tmp_path_factory.mktemp("random"))
