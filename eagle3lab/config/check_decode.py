"""Values of `decode` that parse but cannot work."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .bounds import positive, within
from .errors import Problem
from .schema import Backend, DecodeConfig

MOST_DRAFTED = 32
HIGHEST_TEMPERATURE = 2.0  # of vLLM
LOWEST_TEMPERATURE = 0.01  # below it an engine may take the likeliest token instead of drawing
MOST_TOGETHER = 1024


def check_decode(decode: DecodeConfig) -> Iterator[Problem]:
    """Every list has values, each of them in its range and once."""
    yield from positive("decode.max_new_tokens", decode.max_new_tokens)
    yield from within("decode.seed", decode.seed, 0, 2**32 - 1, proposal=0)
    yield from _values("decode.k", decode.k, 1, MOST_DRAFTED, "[3]")
    yield from _values("decode.batch_sizes", decode.batch_sizes, 1, MOST_TOGETHER, "[1]")
    sampled = [t for t in decode.temperature if t != 0]
    if not decode.temperature or sampled:
        yield from _values(
            "decode.temperature", sampled, LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE, "[0.0]", also="0"
        )
    if decode.temperature.count(0) > 1:
        yield Problem(
            "decode.temperature", decode.temperature, "every value once", "decode.temperature=[0.0]"
        )
    if decode.backend is Backend.hf:
        yield from one_at_a_time(decode.batch_sizes)


def one_at_a_time(batch_sizes: Sequence[int]) -> Iterator[Problem]:
    """What the reference decoder cannot do."""
    if list(batch_sizes) != [1]:
        yield Problem(
            "the reference decoder decodes one text at a time; decode.batch_sizes",
            list(batch_sizes),
            "[1], or vLLM",
            "decode.batch_sizes=[1], or decode.backend=vllm",
        )


def _values(
    key: str, values: Sequence[float], low: float, high: float, proposal: str, also: str = ""
) -> Iterator[Problem]:
    """`nan` is in no range."""
    if not values or not all(low <= v <= high for v in values) or len(set(values)) != len(values):
        numbers = f"numbers in [{low:g}, {high:g}]" + (f" or {also}" if also else "")
        yield Problem(key, list(values), f"{numbers}, at least one and each once", f"{key}={proposal}")
