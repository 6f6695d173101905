"""What is refused of `decode`, all at once."""

from __future__ import annotations

import math

import pytest

from eagle3lab.config.check_decode import check_decode
from eagle3lab.config.schema import Backend, DecodeConfig


@pytest.mark.parametrize(
    ("values", "whats"),
    [
        ({}, []),
        ({"k": [1, 3, 5, 7], "temperature": [0.0, 1.0], "batch_sizes": [1, 32], "backend": Backend.vllm}, []),
        ({"k": []}, ["decode.k"]),
        ({"k": [0]}, ["decode.k"]),
        ({"k": [33]}, ["decode.k"]),
        ({"k": [3, 3]}, ["decode.k"]),
        ({"temperature": []}, ["decode.temperature"]),
        ({"temperature": [-1.0]}, ["decode.temperature"]),
        ({"temperature": [0.0, 0.001]}, ["decode.temperature"]),
        ({"temperature": [2.5]}, ["decode.temperature"]),
        ({"temperature": [0.0, 0.0]}, ["decode.temperature"]),
        ({"temperature": [math.nan]}, ["decode.temperature"]),
        (
            {"batch_sizes": [0], "max_new_tokens": 0, "seed": -1},
            ["decode.max_new_tokens", "decode.seed", "decode.batch_sizes"],
        ),
    ],
)
def test_values_out_of_range_are_named_with_what_would_do(values: dict, whats: list[str]) -> None:
    problems = list(check_decode(DecodeConfig(**values)))
    assert [problem.what for problem in problems] == whats
    assert all(problem.fix.startswith(f"{problem.what}=") for problem in problems)


def test_the_reference_decoder_is_known_to_decode_one_text_at_a_time() -> None:
    (problem,) = check_decode(DecodeConfig(backend=Backend.hf, batch_sizes=[1, 8]))
    assert "one text at a time" in problem.what
    assert problem.fix == "decode.batch_sizes=[1], or decode.backend=vllm"
