"""One engine that several threads ask: whoever waits for an answer drives it, for all of them.

The requests of every thread lie in the engine together, so that it is not idle between the last answer of
one and the first prompt of another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Lock
from typing import Any


@dataclass
class _Request:
    prompts: Sequence[Any]
    parameters: Sequence[Any]
    answers: dict[int, Any] = field(default_factory=dict)  # by position
    error: Exception | None = None

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.answers) == len(self.prompts)


class Turns:
    """A queue before an engine that only one thread may touch at a time."""

    def __init__(
        self,
        add: Callable[[Sequence[Any], Sequence[Any]], Sequence[tuple[Hashable, ...]]],
        step: Callable[[], Iterable[tuple[Hashable, Any]]],
        rest: Callable[[], None],
        drop: Callable[[Any], None],
    ) -> None:
        """How to touch the engine.

        Args:
            add: hands prompts and their parameters to the engine; the names under which each may be answered.
            step: waits for the engine; the finished answers by name.
            rest: called when nothing is left to answer.
            drop: takes an answer that nobody waits for any more.
        """
        self._add, self._step, self._rest, self._drop = add, step, rest, drop
        self._new: deque[_Request] = deque()
        self._open: dict[Hashable, tuple[_Request, int, tuple[Hashable, ...]]] = {}
        self._changed, self._driven = Condition(), False

    def ask(self, prompts: Sequence[Any], parameters: Sequence[Any]) -> list[Any]:
        """One answer per prompt, in their order; raises what the engine raised meanwhile."""
        request = _Request(prompts, parameters)
        self._new.append(request)
        while self._must_drive(request):
            try:
                self._turn()
            finally:
                with self._changed:
                    self._driven = False
                    self._changed.notify_all()
        if request.error is not None:
            raise request.error
        return [request.answers[i] for i in range(len(prompts))]

    def _must_drive(self, request: _Request) -> bool:
        """False when the request is done; else waits until it is, or nobody drives the engine any more."""
        with self._changed:
            self._changed.wait_for(lambda: request.done or not self._driven)
            if request.done:
                return False
            self._driven = True
            return True

    def _turn(self) -> None:
        """Hand over what is new, then wait once for the engine."""
        while self._new:
            self._hand_over(self._new.popleft())
        if not self._open:
            return
        try:
            for name, answer in self._step():
                self._take(name, answer)
            if not self._open and not self._new:
                self._rest()
        except Exception as error:  # whose prompt it was cannot be told
            requests = {id(request): request for request, *_ in self._open.values()}
            self._open.clear()
            for request in requests.values():
                self._fail(request, error)
            if not requests:
                raise

    def _hand_over(self, request: _Request) -> None:
        try:
            names = self._add(request.prompts, request.parameters)
        except Exception as error:
            self._fail(request, error)
            return
        for i, of_prompt in enumerate(names):
            self._open.update(dict.fromkeys(of_prompt, (request, i, of_prompt)))

    def _take(self, name: Hashable, answer: Any) -> None:
        if name not in self._open:
            self._drop(answer)
            return
        request, i, of_prompt = self._open[name]
        for other_name in of_prompt:
            del self._open[other_name]
        request.answers[i] = answer

    def _fail(self, request: _Request, error: Exception) -> None:
        for answer in request.answers.values():
            self._drop(answer)
        request.error = error


class Backlog:
    """How many tokens an engine has before it, of all who wait for it."""

    def __init__(self) -> None:
        self._lock, self._num_tokens = Lock(), 0

    @contextmanager
    def behind(self, num_tokens: int) -> Iterator[int]:
        """The tokens that must be done before `num_tokens` more are, these included."""
        with self._lock:
            self._num_tokens += num_tokens
            total = self._num_tokens
        try:
            yield total
        finally:
            with self._lock:
                self._num_tokens -= num_tokens
