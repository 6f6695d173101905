"""Data parallelism: the same engine several times, each in a process of its own on its own devices.

The replicas share nothing: a verifier's prefill of one row needs no other row. Only file names travel
between the processes; the states lie in memory files that the parent reads.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from multiprocessing.connection import Connection
from threading import Lock
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.engines.base import Answer, EngineDied, EngineError, Sampling
from eagle3lab.engines.turns import Backlog

CLOSE_SECONDS = 120.0
START = 0  # the number of the first answer: that the engine is loaded
CALLS_AT_ONCE = 256  # threads at most; each waits for its call (`vllm_engine.CALLS_PER_RUNNER`)
POLL_SECONDS = 0.1
GRACE_SECONDS = 60.0  # a replica bounds its own work; the parent waits this much longer for it to say so


class RemoteRunner:
    """An `EngineRunner` in a process of its own. Every wait has an end."""

    def __init__(
        self,
        make: Callable[[Any], Any],
        settings: Any,
        environment: Mapping[str, str],
        *,
        start_seconds: float,
        answer_seconds: Callable[[int], float],
    ) -> None:
        """Start `make(settings)` in a new process with `environment`; `wait_ready` waits for it."""
        context = multiprocessing.get_context("spawn")
        self._answer_seconds = answer_seconds
        self._start_seconds = start_seconds
        self._pipe, theirs = context.Pipe()
        self._sending, self._receiving = Lock(), Lock()
        self._answers: dict[int, tuple[str, Any]] = {}  # that came while another call was waited for
        self._calls = count(1)
        self._backlog = Backlog()
        self._process = context.Process(target=_serve, args=(theirs, make, settings, dict(environment)))
        self._process.start()
        theirs.close()
        atexit.register(self.close)  # before multiprocessing would wait for the process for ever

    def wait_ready(self) -> None:
        """Wait until the engine is loaded; raises what it raised."""
        self._receive(START, self._start_seconds + GRACE_SECONDS, "starting a replica")

    def versions(self) -> dict[str, str]:
        return self._call("versions", num_tokens=0)

    def ask(self, rows: Sequence[Sequence[int]]) -> list[str]:
        return self._call("ask", [list(row) for row in rows], num_tokens=sum(map(len, rows)))

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], str | None]:
        return self._call("generate", list(prompt), max_new_tokens, num_tokens=len(prompt) + max_new_tokens)

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
    ) -> list[Answer]:
        num_tokens = sum(map(len, prompts)) + sum(max_new_tokens)
        requests = [list(prompt) for prompt in prompts], sampling, list(seeds), list(max_new_tokens)
        return self._call("answer", *requests, num_tokens=num_tokens)

    def record(self, row: Sequence[int], layer_ids: Sequence[int], path: str) -> list[str]:
        return self._call("record", list(row), list(layer_ids), path, num_tokens=len(row))

    def close(self) -> None:
        """Ask the process to end, and end it when it does not."""
        atexit.unregister(self.close)
        if self._process.is_alive():
            try:
                with self._sending:
                    self._pipe.send(None)
                self._process.join(CLOSE_SECONDS)
            except OSError:  # it died meanwhile
                pass
        self._end()

    def _call(self, method: str, *arguments: Any, num_tokens: int) -> Any:
        """One call; several threads may have one each under way."""
        with self._sending:
            call = next(self._calls)
            try:
                self._pipe.send((call, method, arguments))
            except OSError as error:
                raise EngineDied(f"a replica ended with exit code {self._process.exitcode}") from error
        with self._backlog.behind(num_tokens) as all_tokens:
            seconds = self._answer_seconds(all_tokens) + GRACE_SECONDS
            return self._receive(call, seconds, f"{method} of a replica")

    def _receive(self, call: int, seconds: float, what: str) -> Any:
        end = time.monotonic() + seconds
        try:
            while call not in self._answers:
                with self._receiving:  # whoever waits reads for all
                    if call not in self._answers and self._pipe.poll(POLL_SECONDS):
                        number, *answer = self._pipe.recv()
                        self._answers[number] = tuple(answer)
                if call not in self._answers and time.monotonic() >= end:
                    self._end()
                    raise EngineDied(f"{what} took longer than {seconds:,.0f} s; the replica was ended")
        except (EOFError, OSError) as error:
            self._process.join(5.0)
            raise EngineDied(f"a replica ended with exit code {self._process.exitcode}") from error
        kind, value = self._answers.pop(call)
        match kind:
            case "answer":
                return value
            case "user":
                raise UserError(*(Problem(*fields) for fields in value))
            case "died":
                raise EngineDied(value)
            case _:
                raise EngineError(value)

    def _end(self) -> None:
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(5.0)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(5.0)


def _serve(
    pipe: Connection, make: Callable[[Any], Any], settings: Any, environment: Mapping[str, str]
) -> None:
    """Body of a replica: build the runner, answer calls, end when the parent says so or is gone."""
    os.environ.update(environment)
    sending = Lock()

    def send(call: int, kind: str, value: Any) -> None:
        with sending:
            pipe.send((call, kind, value))

    runner = _answer(partial(send, START), lambda: make(settings), keep=True)
    if runner is None:
        return
    try:
        with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
            while (call := _next_call(pipe)) is not None:
                number, method, arguments = call
                pool.submit(_answer, partial(send, number), partial(getattr(runner, method), *arguments))
    finally:
        runner.close()


def _next_call(pipe: Connection) -> tuple[int, str, tuple[Any, ...]] | None:
    """None when the parent says that there is none, or is gone."""
    try:
        call: tuple[int, str, tuple[Any, ...]] | None = pipe.recv()
    except EOFError:
        return None
    return call


def _answer(send: Callable[[str, Any], None], work: Callable[[], Any], *, keep: bool = False) -> Any:
    """Send what `work` returns or raises; returns it. `keep`: it stays here, the answer is empty."""
    try:
        value = work()
    except UserError as error:
        fields = [
            (p.what, None if p.value is None else str(p.value), p.expected, p.fix) for p in error.problems
        ]
        send("user", fields)
    except EngineDied as error:
        send("died", str(error))
    except Exception as error:
        send("error", f"{type(error).__name__}: {error}")
    else:
        send("answer", None if keep else value)
        return value
    return None


def device_groups(visible: str | None, num_devices: int, group_size: int, num_groups: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES of every group: consecutive devices of those this process may use.

    Raises UserError when there are too few.
    """
    devices = visible.split(",") if visible else [str(i) for i in range(num_devices)]
    needed = group_size * num_groups
    if len(devices) < needed:
        raise UserError(
            Problem(
                f"the engine needs {needed} devices (tensor_parallel {group_size} x data_parallel {num_groups})",
                len(devices),
                f"at least {needed} visible devices",
                f"hardware.engine.data_parallel={max(1, len(devices) // group_size)}",
            )
        )
    return [",".join(devices[i * group_size : (i + 1) * group_size]) for i in range(num_groups)]
