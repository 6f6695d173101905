"""The reference decoder: chain drafting, greedy verification, and the verifier alone to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from eagle3lab.engines.session import VerifierSession


class Drafter(Protocol):
    """A draft model at work on one sequence; `eagle3lab.draft.inference.ChainDrafter` is one."""

    def extend(self, aux: Tensor, tokens: Tensor) -> object:
        """Take verified positions: aux states g_i [n, n_aux * hidden_size], next tokens x_{i+1} [n]."""
        ...

    def propose(self, num_tokens: int) -> list[int]:
        """The next tokens as verifier ids; leaves no trace in what `extend` has built."""
        ...


@dataclass(frozen=True)
class Prefill:
    """A prompt in the session's cache, shared by every way of decoding on from it."""

    prompt: tuple[int, ...]
    first: int  # the first new token: the verifier's own, no draft is involved
    aux: Tensor  # shape: [P, n_aux * hidden_size]


@dataclass(frozen=True)
class Decoded:
    """New tokens of one prompt. `seconds` starts after the verifier's prefill."""

    tokens: tuple[int, ...]
    seconds: float
    accepted: tuple[int, ...] = ()  # of every verification step
    num_cut: int = 0  # tokens of the last step beyond the end token or the budget


def prefill(session: VerifierSession, prompt: Sequence[int]) -> Prefill:
    """Feed the prompt to a fresh session."""
    step = session.forward(prompt, num_logits=1)
    assert step.aux is not None, "the session records no aux layers"
    return Prefill(tuple(prompt), int(step.logits[-1].argmax()), step.aux)


def decode_plain(session: VerifierSession, start: Prefill, budget: int, end_ids: Collection[int]) -> Decoded:
    """The verifier's own greedy decoding, one token per forward; the cache ends as it began."""
    clock = _Clock(start.aux.device)
    tokens = [start.first]
    while len(tokens) < budget and tokens[-1] not in end_ids:
        step = session.forward(tokens[-1:], states=False)
        tokens.append(int(step.logits[-1].argmax()))
    seconds = clock.seconds()
    session.crop(len(start.prompt))
    return Decoded(tuple(tokens), seconds)


def decode_with_draft(
    session: VerifierSession,
    start: Prefill,
    make_drafter: Callable[[], Drafter],
    k: int,
    budget: int,
    end_ids: Collection[int],
) -> Decoded:
    """Greedy decoding with k drafted tokens per verification step; the cache ends as it began.

    The drafter has seen (g_i, x_{i+1}) for every verified position and proposes the k tokens that
    follow. The verifier runs over the newest token and the k proposals at once: the proposals that
    equal its own choices are kept, and its choice after them is the bonus token. The draft's own
    prefill is part of `seconds`.
    """
    device = start.aux.device
    clock = _Clock(device)
    tokens, steps, num_cut = [start.first], list[int](), 0
    with torch.no_grad():
        drafter = make_drafter()
        drafter.extend(start.aux, torch.tensor([*start.prompt[1:], start.first], device=device))
        while len(tokens) < budget and tokens[-1] not in end_ids:
            drafted = drafter.propose(k)
            step = session.forward([tokens[-1], *drafted])
            chosen = step.logits.argmax(-1).tolist()  # [k + 1]
            accepted = next((j for j in range(k) if drafted[j] != chosen[j]), k)
            emitted = chosen[: accepted + 1]
            session.crop(session.length - (k - accepted))
            steps.append(accepted)
            kept = _until_end(emitted, end_ids)[: budget - len(tokens)]
            num_cut += len(emitted) - len(kept)
            tokens += kept
            if len(kept) == len(emitted):
                assert step.aux is not None
                drafter.extend(step.aux[: accepted + 1], torch.tensor(emitted, device=device))
    seconds = clock.seconds()
    session.crop(len(start.prompt))
    return Decoded(tuple(tokens), seconds, tuple(steps), num_cut)


@dataclass(frozen=True)
class Difference:
    """Where decoding with a draft left the verifier's greedy text.

    Verification runs k + 1 tokens at once and plain decoding one: two orders of summation, so a near
    tie between two tokens can fall either way. `logit_gap` is what separates the two tokens in a fresh
    forward of the common text; `near_tie` says whether rounding explains it.
    """

    position: int  # among the new tokens
    plain: int | None  # None: the text ended here
    drafted: int | None
    logit_gap: float | None
    near_tie: bool


def first_difference(
    session: VerifierSession, start: Prefill, plain: Sequence[int], drafted: Sequence[int], tie: float
) -> Difference | None:
    """None when both are equal token by token.

    Args:
        tie: a gap within this share of the largest absolute logit counts as a near tie.
    """
    if list(plain) == list(drafted):
        return None
    shared = next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
        min(len(plain), len(drafted)),
    )
    if shared >= min(len(plain), len(drafted)):
        ends = [tokens[shared] if shared < len(tokens) else None for tokens in (plain, drafted)]
        return Difference(shared, ends[0], ends[1], None, False)
    session.crop(0)
    logits = session.forward([*start.prompt, *plain[:shared]], num_logits=1, states=False).logits[-1].float()
    session.crop(len(start.prompt))
    gap = float((logits[plain[shared]] - logits[drafted[shared]]).abs())
    return Difference(shared, plain[shared], drafted[shared], gap, gap <= tie * float(logits.abs().max()))


def _until_end(tokens: list[int], end_ids: Collection[int]) -> list[int]:
    end = next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return tokens[: end + 1]


class _Clock:
    """Wall time that waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start = self._now()

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def seconds(self) -> float:
        return self._now() - self._start
