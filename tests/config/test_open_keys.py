"""Values that are dictionaries take any key from the command line; every other key must be known."""

from __future__ import annotations

import pytest

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import UserError


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (
            ["data.role_map={solver-9b:assistant}"],
            lambda cfg: cfg.data.role_map == {"solver-9b": "assistant"},
        ),
        (["data.role_map.observation=tool"], lambda cfg: cfg.data.role_map == {"observation": "tool"}),
        (
            ["model.template_args={enable_thinking:false}"],
            lambda cfg: cfg.model.template_args == {"enable_thinking": False},
        ),
        (
            ["hardware.environment.NCCL_DEBUG=WARN"],
            lambda cfg: cfg.hardware.environment["NCCL_DEBUG"] == "WARN",
        ),
    ],
)
def test_a_dictionary_takes_keys_of_its_own(words, found) -> None:
    assert found(compose.compose_alone("extract", ["hardware=cpu", *words], CHECKS["extract"]))


def test_a_key_beside_them_must_be_known() -> None:
    with pytest.raises(UserError, match=r"unknown key model\.template_arg"):
        compose.compose_alone("extract", ["hardware=cpu", "model.template_arg={a:1}"], CHECKS["extract"])
