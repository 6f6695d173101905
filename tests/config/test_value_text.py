"""Values as they are typed: read back by Hydra's grammar they are the same."""

from __future__ import annotations

from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from eagle3lab.config.value_text import as_typed


@pytest.mark.parametrize(
    "value", [None, True, False, 7, 1e-05, 0.00012345678, "uniform", [2, 15, 28], [True, None, [0.1]], []]
)
def test_a_value_as_it_is_typed_is_read_as_itself(value: Any) -> None:
    (override,) = OverridesParser.create().parse_overrides([f"key={as_typed(value)}"])
    assert override.value() == value
    assert type(override.value()) is type(value)
