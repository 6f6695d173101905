"""The interface every way of running a verifier has, and the check of what comes back from one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem


@dataclass(frozen=True)
class States:
    """The hidden states of one row, together with the token ids they belong to.

    `last` is the residual stream after the last decoder layer, before the final norm.
    """

    token_ids: Tensor  # shape: [T], int64
    aux: Tensor  # shape: [T, n_aux * hidden_size], in the order of the layer ids asked for
    last: Tensor  # shape: [T, hidden_size]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn. `temperature` 0 takes the likeliest; `top_k` 0 and `top_p` 1 cut nothing off."""

    temperature: float
    top_p: float
    top_k: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    """What the verifier generated for one prompt."""

    token_ids: tuple[int, ...]  # the stop token included
    ended: bool  # by a stop token, and not because the tokens it was allowed were spent


@dataclass(frozen=True)
class Recording:
    """What the hooks saw of one row; all on the CPU in the compute dtype."""

    token_ids: Tensor  # shape: [T], as they reached the embedding
    layers: dict[int, Tensor]  # layer id -> [T, hidden_size]
    pre_norm: Tensor  # shape: [T, hidden_size]; residual stream that entered the final norm
    post_norm: Tensor  # shape: [T, hidden_size]


class EngineError(RuntimeError):
    """The engine gave no answer to a request. Asking once more may help."""


class EngineDied(EngineError):
    """The engine is gone: no later request will be answered."""


class Engine(Protocol):
    """One loaded verifier.

    `pads` says that `capture` fills its rows up to the longest, so that a batch should hold rows of like
    length; an engine that does not pad schedules by itself and is given many rows at once.
    `concurrency` is how many calls of `capture`, from as many threads, keep it busy all the time.
    """

    name: str
    pads: bool
    concurrency: int

    def versions(self) -> dict[str, str]:
        """What ran the verifier: library versions, dtype, attention kernel. Goes into the manifest."""
        ...

    def capture(self, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States]:
        """Hidden states of every row from one forward pass; layer id k = output of decoder layer k from 1."""
        ...

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy continuation; ends after an end-of-sequence id, which is included."""
        ...

    def close(self) -> None:
        """Free the verifier's memory."""
        ...


class Answerer(Protocol):
    """One loaded verifier that answers prompts.

    `answers_at_once` is how many prompts it should be given together, so that it is never idle.
    """

    name: str
    answers_at_once: int

    def versions(self) -> dict[str, str]:
        """As of `Engine`."""
        ...

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
    ) -> list[Answer]:
        """One answer per prompt, drawn with the prompt's own seed and at most its own `max_new_tokens` long.

        Raises ValueError for an empty prompt and for one that has no room for what it may be answered.
        """
        ...

    def close(self) -> None:
        """Free the verifier's memory."""
        ...


@runtime_checkable
class SecondOpinion(Protocol):
    """An engine that can capture a second time, by means that share nothing with `capture`."""

    def record(self, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[Recording]:
        """The outputs of decoder layers `layer_ids` and both sides of the final norm, row by row."""
        ...


def check_states(states: States, row: Sequence[int], num_aux: int, hidden_size: int) -> None:
    """Hold a backend's answer against the request: token ids, number of rows, slots, finite, non-zero.

    Raises:
        IntegrityError: naming the first thing that differs.
    """
    num_tokens = len(row)
    if states.token_ids.tolist() != list(row):
        raise _broken(
            "the engine returned states of other token ids",
            tuple(states.token_ids.shape),
            f"{num_tokens} ids",
        )
    for name, tensor, width in (
        ("aux", states.aux, num_aux * hidden_size),
        ("last", states.last, hidden_size),
    ):
        if tuple(tensor.shape) != (num_tokens, width):
            raise _broken(f"the engine returned {name} states of another shape", tuple(tensor.shape),
                          f"({num_tokens}, {width}): {width // hidden_size} layers")  # fmt: skip
        _check_values(name, tensor.reshape(num_tokens, -1, hidden_size))


def _check_values(name: str, states: Tensor) -> None:
    """Raise IntegrityError for NaN, Inf or states that are zero throughout.

    states: [T, slots, hidden]. One norm per vector decides, at the speed of memory; only a suspicious one is
    looked at in full.
    """
    norms = torch.linalg.vector_norm(states, dim=-1)
    if not torch.isfinite(norms).all():
        count = int((~torch.isfinite(states)).sum())
        if count:
            raise _broken(
                f"the engine returned {name} states with NaN or Inf", f"{count} elements", "finite values"
            )
    if not norms.any() and not states.any():
        raise _broken(f"the engine returned {name} states that are all zero", None, "the verifier's states")


def _broken(what: str, value: object, expected: str) -> IntegrityError:
    fix = "another back end (extract.backend=hf), or a checkpoint whose weights are whole (model.path=...)"
    return IntegrityError(Problem(what, value, expected, fix))


def first_line(error: BaseException) -> str:
    """Of a message that may be pages long; the kind of error where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
