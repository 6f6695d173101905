"""Every prompt by the reference decoder: one text at a time, verifier and draft in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from torch import nn

from eagle3lab.config.schema import DecodeConfig
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.sampling import hashed_seed
from eagle3lab.evaluate.decoder import (
    Decoded,
    Difference,
    decode_plain,
    decode_with_draft,
    first_difference,
    prefill,
)
from eagle3lab.evaluate.results import Pass, Task, Way
from eagle3lab.evaluate.rules import make_rule

SPEED = "decoding alone: the prompt's forward, and the token that comes from it, are in neither"
WARM_UP_TOKENS = 2

One = dict[Way, tuple[Decoded, Difference | None]]


def decode_by_reference(
    engine: HuggingFaceEngine,
    drafts: Mapping[str, nn.Module],
    tasks: Sequence[Task],
    decode: DecodeConfig,
    *,
    aux_layer_ids: Sequence[int],
    end_ids: frozenset[int],
    near_tie: float,
    done: Callable[[Task, One], None],
) -> list[Pass]:
    """One pass per draft, k and temperature, and one of the verifier alone per temperature.

    A prompt is decoded every way before the next one, from one prefill. `done` hears of each.
    """

    def decode_task(task: Task, budget: int) -> One:
        session = engine.session(aux_layer_ids)
        start = prefill(session, task.ids)
        texts: dict[Way, Decoded] = {}
        for temperature in decode.temperature:
            seed = hashed_seed(decode.seed, task.prompt.prompt_id, temperature)
            rule = partial(make_rule, temperature, decode.proposal, seed)
            texts[Way("", 0, temperature, 1)] = decode_plain(session, start, budget, end_ids, rule())
            for variant, draft in drafts.items():
                for k in decode.k:
                    texts[Way(variant, k, temperature, 1)] = decode_with_draft(
                        session, start, partial(ChainDrafter, draft), k, budget, end_ids, rule()
                    )
        # compared at the end: the comparison runs the prompt again, which must not be between two timings
        found: One = {}
        for way, text in texts.items():
            greedy = way.k and way.temperature == 0
            own = texts[way.alone].tokens
            found[way] = (
                text,
                first_difference(session, start, own, text.tokens, near_tie) if greedy else None,
            )
        return found

    decode_task(tasks[0], min(WARM_UP_TOKENS, tasks[0].budget))  # first calls allocate and compile
    results = []
    for task in tasks:
        results.append(decode_task(task, task.budget))
        done(task, results[-1])
    return [_as_pass(way, [one[way] for one in results]) for way in results[0]]


def _as_pass(way: Way, found: Sequence[tuple[Decoded, Difference | None]]) -> Pass:
    texts = tuple(text for text, _ in found)
    differences = tuple(difference for _, difference in found) if way.k and way.temperature == 0 else ()
    num_tokens = sum(len(text.tokens) - 1 for text in texts)
    return Pass(way, texts, num_tokens, sum(text.seconds for text in texts), differences)
