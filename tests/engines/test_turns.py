"""`Turns` before an engine that counts who touches it, and what it holds."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from eagle3lab.engines.turns import Turns


class FakeEngine:
    """Answers the oldest two prompts per step with their square; a 0 among them breaks the step."""

    def __init__(self) -> None:
        self.waiting: list[tuple[str, int]] = []
        self.held: list[int] = []  # prompts in the engine at every step
        self.rests, self.dropped = 0, list[object]()
        self.touching = threading.Lock()
        self.count = 0

    def add(self, prompts, _parameters):
        assert self.touching.acquire(blocking=False)
        if 13 in prompts:
            self.touching.release()
            raise ValueError("no such prompt")
        names = []
        for prompt in prompts:
            self.count += 1
            self.waiting.append((str(self.count), prompt))
            names.append((str(self.count), f"{self.count}-abc"))
        self.touching.release()
        return names

    def step(self):
        assert self.touching.acquire(blocking=False)
        time.sleep(0.01)
        self.held.append(len(self.waiting))
        taken, self.waiting = self.waiting[:2], self.waiting[2:]
        self.touching.release()
        if any(prompt == 0 for _, prompt in taken):
            raise RuntimeError("broken step")
        return [(name, prompt**2) for name, prompt in reversed(taken)]

    def rest(self):
        self.rests += 1

    def turns(self) -> Turns:
        return Turns(self.add, self.step, self.rest, self.dropped.append)


def test_every_thread_gets_the_answers_to_its_prompts_in_their_order() -> None:
    engine = FakeEngine()
    turns = engine.turns()
    asked = [list(range(10 * i + 20, 10 * i + 20 + n)) for i, n in enumerate((3, 7, 1, 4, 0, 6))]
    with ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda prompts: turns.ask(prompts, prompts), asked))
    assert answers == [[prompt**2 for prompt in prompts] for prompts in asked]
    assert not engine.dropped


def test_the_prompts_of_a_second_thread_lie_in_the_engine_before_those_of_the_first_are_answered() -> None:
    engine = FakeEngine()
    turns = engine.turns()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda prompts: turns.ask(prompts, prompts), [[2] * 20] * 2))
    assert max(engine.held) > 20
    assert min(engine.held[:-1]) > 2  # never near empty before the end
    assert engine.rests == 1


def test_a_broken_step_fails_every_request_in_the_engine_and_none_after_it() -> None:
    engine = FakeEngine()
    turns = engine.turns()
    with pytest.raises(RuntimeError, match="broken step"):
        turns.ask([3, 4, 0, 5, 6, 7], [None] * 6)
    assert sorted(engine.dropped) == [9, 16]  # answers of the failed request
    assert turns.ask([8], [None]) == [64]
    assert sorted(engine.dropped) == [9, 16, 36, 49]  # and its late ones, when they come


def test_prompts_that_the_engine_refuses_fail_alone() -> None:
    engine = FakeEngine()
    turns = engine.turns()
    with ThreadPoolExecutor(2) as pool:
        good = pool.submit(turns.ask, [2] * 12, [None] * 12)
        bad = pool.submit(turns.ask, [13], [None])
        with pytest.raises(ValueError, match="no such prompt"):
            bad.result()
        assert good.result() == [4] * 12
