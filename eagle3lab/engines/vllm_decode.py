"""Decoding by a vLLM engine step by step, so that every verification step of every sequence is seen whole.

The engine's own counts are sums over all sequences, and where it ends a text inside a step itself, what that
step accepted beyond the end is in those sums alone. So it is not told where texts end: it hands over the tokens
of every step, and a text that is at its end is taken from it then. Imports no vllm.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3lab.engines.base import EngineError

_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "drafted",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@dataclass(frozen=True)
class DecodeRequest:
    """One text to decode. It ends with the first end token or with `budget` new tokens."""

    prompt: tuple[int, ...]
    budget: int
    seed: int


@dataclass(frozen=True)
class DecodedSteps:
    """The tokens of every step, whole ones: the last may reach beyond the text's end.

    The first step is the prompt's own and emits one token; every later one verified k drafted tokens.
    """

    steps: tuple[tuple[int, ...], ...]
    seconds: float  # from the first token to the last


@dataclass(frozen=True)
class EngineCounts:
    """What an engine counts itself (`vllm:spec_decode_*`), over a stretch of time."""

    drafts: int = 0
    drafted: int = 0
    accepted_at: tuple[int, ...] = ()

    def __sub__(self, other: EngineCounts) -> EngineCounts:
        before = other.accepted_at or (0,) * len(self.accepted_at)
        at = tuple(a - b for a, b in zip(self.accepted_at, before, strict=True))
        return EngineCounts(self.drafts - other.drafts, self.drafted - other.drafted, at)


@dataclass(frozen=True)
class DecodedPass:
    """All texts of one pass. `seconds` is its wall time, the prompts' forwards included."""

    texts: tuple[DecodedSteps, ...]
    seconds: float
    late_steps: int  # that the engine ran before it heard that a text had ended; in no text
    late_cut: int  # of those, ones that the engine's limit may have cut
    counts: EngineCounts  # the engine's own, late steps included


@dataclass
class _Running:
    index: int
    request: DecodeRequest
    steps: list[tuple[int, ...]] = field(default_factory=list)
    num_tokens: int = 0
    first_at: float = 0.0
    last_at: float = 0.0
    ended: bool = False

    def take(self, tokens: tuple[int, ...], end_ids: Collection[int], now: float) -> None:
        self.first_at = self.first_at or now
        self.last_at = now
        self.steps.append(tokens)
        self.num_tokens += len(tokens)
        self.ended = self.num_tokens >= self.request.budget or any(token in end_ids for token in tokens)


def decode_pass(
    engine: Any,
    requests: Sequence[DecodeRequest],
    parameters: Callable[[int, int], Any],
    *,
    at_once: int,
    end_ids: Collection[int],
    k: int,
) -> DecodedPass:
    """Decode every request, `at_once` of them together: the next one enters when one ends.

    Args:
        engine: a `vllm.v1` LLMEngine with its own counts switched on.
        parameters: sampling parameters from a seed and a limit of tokens: deltas, no stop, no end token.
        k: drafted tokens per step, 0 without a draft.
    Raises EngineError when the engine's own counts are not those of the steps seen.
    """
    before = engine_counts(engine)
    waiting = list(enumerate(requests))[::-1]
    running: dict[str, _Running] = {}
    texts: dict[int, DecodedSteps] = {}
    ids: dict[str, str] = {}  # ours -> the engine's
    late: list[tuple[int, bool]] = []  # tokens of late steps, and whether the limit may have cut them
    start = end = time.perf_counter()
    while waiting or any(not text.ended for text in running.values()):
        while waiting and len(requests) - len(waiting) - len(texts) < at_once:
            index, request = waiting.pop()
            name = f"text-{index}"
            running[name] = _Running(index, request)
            prompt = {"prompt_token_ids": list(request.prompt)}
            ids[name] = engine.add_request(name, prompt, parameters(request.seed, request.budget + k))
        for output in engine.step():
            tokens = tuple(output.outputs[0].token_ids)
            text, now = running[output.request_id], time.perf_counter()
            if text.ended or not tokens:
                late += [(len(tokens), output.finished)] if tokens else []
                continue
            text.take(tokens, end_ids, now)
            if text.ended:
                end = now
                texts[text.index] = DecodedSteps(tuple(text.steps), text.last_at - text.first_at)
                if not output.finished:  # taken from the core alone: what it sends meanwhile must be seen
                    engine.engine_core.abort_requests([ids[output.request_id] or output.request_id])
            elif output.finished:
                raise EngineError(f"vLLM ended {output.request_id} after {text.num_tokens} tokens by itself")
    late += _drain(engine, parameters(0, 1), requests[0].prompt)
    engine.abort_request(list(ids))
    counts = engine_counts(engine) - before
    found = DecodedPass(
        tuple(texts[i] for i in range(len(requests))),
        end - start,
        len(late),
        sum(cut for _, cut in late),
        counts,
    )
    _hold_against(found, [n for n, _ in late], k)
    return found


def _drain(engine: Any, parameters: Any, prompt: Sequence[int]) -> list[tuple[int, bool]]:
    """Late steps still under way: the answer to one more request, of a token, comes after them all."""
    late: list[tuple[int, bool]] = []
    engine.add_request("last", {"prompt_token_ids": list(prompt)}, parameters)
    while True:
        for output in engine.step():
            if output.request_id == "last":
                if output.finished:
                    return late
            elif output.outputs[0].token_ids:
                late.append((len(output.outputs[0].token_ids), output.finished))


def engine_counts(engine: Any) -> EngineCounts:
    """The engine's own counts since it was started; zeros where it drafts nothing."""
    values: dict[str, int] = {}
    accepted: tuple[int, ...] = ()
    for metric in engine.get_metrics():
        if metric.name in _COUNTERS:
            name = _COUNTERS[metric.name]
            values[name] = values.get(name, 0) + int(metric.value)
        elif metric.name == _PER_POSITION:
            accepted = tuple(int(v) for v in metric.values)
    return EngineCounts(values.get("drafts", 0), values.get("drafted", 0), accepted)


def _hold_against(found: DecodedPass, late: Sequence[int], k: int) -> None:
    """The steps seen, late ones included, must be those that the engine counted, at every position."""
    sizes = [len(step) for text in found.texts for step in text.steps[1:]]
    firsts = {len(text.steps[0]) for text in found.texts}
    if firsts != {1} or (not k and set(sizes) - {1}):
        raise EngineError(
            f"vLLM emitted {sorted(firsts)} tokens with a prompt, {sorted(set(sizes))} with a step"
        )
    if not k:
        return
    sizes += late
    seen = tuple(sum(size > j + 1 for size in sizes) for j in range(k))
    counted = found.counts
    rest = [theirs - ours for theirs, ours in zip(counted.accepted_at or (0,) * k, seen, strict=True)]
    if (
        counted.drafts != len(sizes)
        or counted.drafted != k * len(sizes)
        or not all(0 <= r <= found.late_cut for r in rest)
    ):
        raise EngineError(
            f"vLLM counted {counted.drafts} steps with {counted.drafted} drafted tokens, accepted by position "
            f"{list(counted.accepted_at)}; its outputs show {len(sizes)} steps of {k}, {list(seen)}"
        )
