"""Every prompt by vLLM's own speculative decoding, the exported draft served as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import DecodeConfig
from eagle3lab.engines.base import EngineError
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.sampling import hashed_seed
from eagle3lab.engines.vllm_decode import DecodedSteps, DecodeRequest
from eagle3lab.engines.vllm_engine import DecodingRunner
from eagle3lab.engines.vllm_settings import Decoding
from eagle3lab.engines.vllm_start import start_vllm_decoder
from eagle3lab.evaluate.decoder import Decoded, Difference, judge, num_shared, until_end
from eagle3lab.evaluate.results import Pass, Task, Way

SPEED = "wall time of a pass over all prompts, prefill included, batch_size texts in flight all the time"
WARM_UP_TOKENS = 8

Start = Callable[[EngineRequest, Decoding], DecodingRunner]


@dataclass(frozen=True)
class Served:
    """All passes, and what served them."""

    passes: list[Pass]
    versions: dict[str, str]
    num_late_steps: int  # that engines ran before they heard that a text had ended; counted nowhere


def decode_by_vllm(
    request: EngineRequest,
    drafts: Mapping[str, Path],
    tasks: Sequence[Task],
    decode: DecodeConfig,
    *,
    end_ids: frozenset[int],
    near_tie: float,
    done: Callable[[Pass], None],
    start: Start = start_vllm_decoder,
) -> Served:
    """One engine after the other: one per draft and k (vLLM fixes k at its start), the verifier alone last.

    `request.max_len` must hold every prompt, its budget and k tokens more. `done` hears of each pass.
    Raises:
        UserError: vLLM is missing, cannot serve this pair, or ended; its counts are not those of its steps.
    """
    _refuse_broken_sampler(request, decode)
    found: list[Pass] = []
    num_late = 0
    most = max(decode.batch_sizes)
    engines = [
        (variant, k, Decoding(most, path, k, decode.proposal.value))
        for variant, path in drafts.items()
        for k in decode.k
    ]
    try:
        for variant, k, decoding in [*engines, ("", 0, Decoding(most))]:
            with closing(start(request, decoding)) as engine:
                for way in _ways(variant, k, decode):
                    one, late = _decode(engine, way, tasks, decode.seed, end_ids)
                    found.append(one)
                    num_late += late
                    done(one)
                if not k:  # the engine without a draft is the judge of differences from it
                    found = _compare(engine, tasks, found, near_tie)
                    versions = engine.versions()
    except EngineError as error:
        raise UserError(
            Problem(
                "vLLM did not decode the prompts", str(error), "an answer to every one", "decode.backend=hf"
            )
        ) from error
    return Served(found, versions, num_late)


def _refuse_broken_sampler(request: EngineRequest, decode: DecodeConfig) -> None:
    if request.device == "cpu" and request.parallel.tensor_parallel > 1 and any(decode.temperature):
        raise UserError(
            Problem(
                "vLLM's CPU build samples wrongly with a draft, and is mended in this process alone; "
                "hardware.engine.tensor_parallel",
                request.parallel.tensor_parallel,
                "1 for decode.temperature above 0",
                "hardware.engine.tensor_parallel=1, decode.temperature=[0.0], or decode.backend=hf",
            )
        )


def _ways(variant: str, k: int, decode: DecodeConfig) -> list[Way]:
    return [Way(variant, k, t, size) for t in decode.temperature for size in decode.batch_sizes]


def _decode(
    engine: DecodingRunner, way: Way, tasks: Sequence[Task], seed: int, end_ids: frozenset[int]
) -> tuple[Pass, int]:
    requests = [
        DecodeRequest(task.ids, task.budget, hashed_seed(seed, task.prompt.prompt_id, way.temperature))
        for task in tasks
    ]
    # once without being measured: first calls allocate and compile
    first = [replace(r, budget=min(WARM_UP_TOKENS, r.budget)) for r in requests[: way.batch_size]]
    engine.decode(first, way.temperature, way.batch_size, end_ids)
    done = engine.decode(requests, way.temperature, way.batch_size, end_ids)
    texts = tuple(
        _cut(text, way.k, task.budget, end_ids) for text, task in zip(done.texts, tasks, strict=True)
    )
    return Pass(way, texts, sum(len(text.tokens) for text in texts), done.seconds), done.late_steps


def _cut(found: DecodedSteps, k: int, budget: int, end_ids: frozenset[int]) -> Decoded:
    """The text of whole steps, as the reference decoder makes it: the last step counts in full, its end is cut."""
    tokens: list[int] = []
    num_cut = 0
    for step in found.steps:
        kept = until_end(step, end_ids, budget - len(tokens))
        num_cut += len(step) - len(kept)
        tokens += kept
    accepted = tuple(len(step) - 1 for step in found.steps[1:]) if k else ()
    return Decoded(tuple(tokens), found.seconds, accepted, num_cut)


def _compare(
    engine: DecodingRunner, tasks: Sequence[Task], passes: Sequence[Pass], near_tie: float
) -> list[Pass]:
    """The greedy passes with their differences from the verifier's own texts of the same batch size."""
    own = {p.way: p for p in passes if p.way.k == 0}
    rows: dict[tuple[int, ...], None] = {}
    places: list[tuple[Pass, int, int, tuple[int, ...]]] = []
    for found in passes:
        if not found.way.k or found.way.temperature:
            continue
        for i, text in enumerate(found.texts):
            plain = own[found.way.alone].texts[i].tokens
            shared = num_shared(plain, text.tokens)
            if shared is None:
                continue
            row = (*tasks[i].ids, *plain[:shared])
            places.append((found, i, shared, row))
            rows[row] = None
    logits = dict(zip(rows, engine.top_logits(list(rows)) if rows else [], strict=True))
    differences: dict[Way, dict[int, Difference]] = {}
    for found, i, shared, row in places:
        plain = own[found.way.alone].texts[i].tokens
        difference = judge(plain, found.texts[i].tokens, shared, logits[row], near_tie)
        differences.setdefault(found.way, {})[i] = difference
    return [
        replace(p, differences=tuple(differences.get(p.way, {}).get(i) for i in range(len(tasks))))
        if p.way.k and p.way.temperature == 0
        else p
        for p in passes
    ]
