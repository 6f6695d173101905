"""What is refused of `data.sampling`, all at once."""

from __future__ import annotations

import math

import pytest

from eagle3lab.config.check_sampling import check_sampling
from eagle3lab.config.schema import DataConfig, SamplingConfig


@pytest.mark.parametrize(
    ("values", "whats"),
    [
        ({}, []),
        ({"temperature": 0.0, "top_p": 1.0, "top_k": 40, "max_new_tokens": 1, "seed": 7}, []),
        ({"temperature": -0.1}, ["data.sampling.temperature"]),
        ({"temperature": math.inf}, ["data.sampling.temperature"]),
        ({"temperature": math.nan}, ["data.sampling.temperature"]),
        (
            {"top_p": 0.0, "top_k": -1, "max_new_tokens": 0, "seed": -1},
            [f"data.sampling.{name}" for name in ("top_p", "top_k", "max_new_tokens", "seed")],
        ),
        ({"top_p": 1.1}, ["data.sampling.top_p"]),
    ],
)
def test_values_out_of_range_are_named_with_what_would_do(values: dict, whats: list[str]) -> None:
    problems = list(check_sampling(DataConfig(regenerate=True, sampling=SamplingConfig(**values))))
    assert [problem.what for problem in problems] == whats
    assert all(problem.fix.startswith(f"{problem.what}=") for problem in problems)


def test_sampling_that_nothing_would_use_is_refused() -> None:
    (problem,) = check_sampling(DataConfig(sampling=SamplingConfig(seed=3)))
    assert problem.value == {"seed": 3}
    assert problem.fix == "data.regenerate=true"
