"""Steps, late steps and counts, with an engine that stands in for vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eagle3lab.engines.base import EngineError
from eagle3lab.engines.vllm_decode import DecodeRequest, EngineCounts, decode_pass

END = 99


class FakeEngine:
    """Emits given steps; hears of requests and aborts, in their order, `lag` steps later; counts as vLLM does.

    steps: by the prompt's first token. Past them it emits single tokens 50 for ever.
    """

    def __init__(self, steps: dict[int, list[list[int]]], k: int, lag: int = 0) -> None:
        self.steps, self.k, self.lag = steps, k, lag
        self.active: dict[str, Any] = {}
        self.entering: dict[str, Any] = {}
        self.most_at_once = 0
        self.orders: list[tuple[int, str]] = []
        self.clock = 0
        self.drafts, self.accepted = 0, [0] * k
        self.engine_core = SimpleNamespace(abort_requests=self._abort)
        self.names: list[str] = []

    def add_request(self, name, prompt, parameters):
        key = prompt["prompt_token_ids"][0]
        inner = f"{name}-{len(self.names)}"
        self.names.append(name)
        self.entering[inner] = (
            self.clock + self.lag,
            SimpleNamespace(
                name=name, queue=[list(s) for s in self.steps[key]], most=parameters, said=0, num=0
            ),
        )
        running = {*self.active, *self.entering} - {i for _, i in self.orders}
        self.most_at_once = max(self.most_at_once, sum(not i.startswith("last") for i in running))
        return inner

    def _abort(self, ids):
        self.orders += [(self.clock + self.lag, i) for i in ids]

    def abort_request(self, names):
        assert set(names) <= set(self.names)

    def step(self):
        for due, inner in list(self.orders):
            if due <= self.clock:
                self.active.pop(inner, None)
                self.orders.remove((due, inner))
        for inner, (due, text) in list(self.entering.items()):
            if due <= self.clock:
                self.active[inner] = text
                del self.entering[inner]
        self.clock += 1
        outputs = []
        for inner, text in list(self.active.items()):
            tokens = text.queue.pop(0) if text.queue else [50]
            if text.num and self.k:
                self.drafts += 1
                for j in range(len(tokens) - 1):
                    self.accepted[j] += 1
            text.num += 1
            tokens = tokens[: text.most - text.said]
            text.said += len(tokens)
            finished = text.said >= text.most
            if finished:
                del self.active[inner]
            outputs.append(
                SimpleNamespace(
                    request_id=text.name, finished=finished, outputs=[SimpleNamespace(token_ids=tokens)]
                )
            )
        return outputs

    def get_metrics(self):
        per = SimpleNamespace(name="vllm:spec_decode_num_accepted_tokens_per_pos", values=list(self.accepted))
        return [
            SimpleNamespace(name="vllm:spec_decode_num_drafts", value=self.drafts),
            SimpleNamespace(name="vllm:spec_decode_num_draft_tokens", value=self.drafts * self.k),
            *([per] if self.k else []),
        ]


def decode(engine, requests, at_once=8):
    return decode_pass(engine, requests, lambda _seed, most: most, at_once=at_once, end_ids={END}, k=engine.k)


STEPS = {1: [[10], [11, 12], [13, END, 15], [7]], 2: [[20], [21], [22, 23, 24, 25], [26, 27]], 3: [[END]]}


@pytest.mark.parametrize("lag", [0, 1, 3])
@pytest.mark.parametrize("at_once", [1, 2, 8])
def test_every_step_of_a_text_is_seen_whole_and_no_other_is_counted(lag, at_once):
    engine = FakeEngine({**STEPS, 2: [*STEPS[2], *[[30, 31]] * 40]}, k=3, lag=lag)
    requests = [DecodeRequest((1, 5), 9, 0), DecodeRequest((2,), 5, 1), DecodeRequest((3,), 4, 2)]
    for _ in range(2):  # the counts of an earlier pass are not those of this one
        found = decode(engine, requests, at_once)
        assert [t.steps for t in found.texts] == [
            ((10,), (11, 12), (13, END, 15)),
            ((20,), (21,), (22, 23, 24, 25)),
            ((END,),),
        ]
        assert found.counts.drafts == 4 + found.late_steps
        assert (found.late_steps > 0) == (lag > 0)
    assert engine.most_at_once <= at_once
    assert not {*engine.active, *engine.entering}


def test_without_late_steps_the_engines_counts_are_those_of_the_texts():
    found = decode(FakeEngine(STEPS, k=3), [DecodeRequest((1,), 9, 0), DecodeRequest((2,), 5, 1)])
    assert found.counts == EngineCounts(4, 12, (3, 2, 1))
    assert found.late_steps == found.late_cut == 0


def test_counts_that_are_not_those_of_the_steps_are_refused():
    engine = FakeEngine(STEPS, k=3)
    metrics = engine.get_metrics

    def one_more():
        found = metrics()
        found[0].value += engine.clock > 0
        return found

    engine.get_metrics = one_more
    with pytest.raises(EngineError, match=r"vLLM counted 3 steps .* its outputs show 2 steps of 3"):
        decode(engine, [DecodeRequest((1,), 9, 0)])


def test_steps_with_fewer_drafted_tokens_than_k_are_refused():
    engine = FakeEngine(STEPS, k=3)
    metrics = engine.get_metrics

    def fewer():
        found = metrics()
        found[1].value -= engine.clock > 0
        return found

    engine.get_metrics = fewer
    with pytest.raises(EngineError, match="5 drafted tokens"):
        decode(engine, [DecodeRequest((1,), 9, 0)])


def test_an_engine_without_a_draft_emits_one_token_per_step():
    found = decode(FakeEngine({1: [[10], [11], [END]]}, k=0), [DecodeRequest((1,), 9, 0)])
    assert found.texts[0].steps == ((10,), (11,), (END,))
    with pytest.raises(EngineError, match=r"\[2\] with a step"):
        decode(FakeEngine({1: [[10], [11, 12], [END]]}, k=0), [DecodeRequest((1,), 3, 0)])


def test_a_text_that_the_engine_ends_by_itself_is_an_error():
    engine = FakeEngine({1: [[10], [11]]}, k=0)
    with pytest.raises(EngineError, match="by itself"):
        decode_pass(
            engine, [DecodeRequest((1,), 9, 0)], lambda _seed, _most: 2, at_once=1, end_ids={END}, k=0
        )
