"""The reference decoder: chain drafting, verification, and the verifier alone to compare with."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lab.engines.session import VerifierSession
from eagle3lab.evaluate.rules import Drafter, GreedyRule, Rule

GREEDY = GreedyRule()


@dataclass(frozen=True)
class Prefill:
    """A prompt in the session's cache, shared by every way of decoding on from it."""

    prompt: tuple[int, ...]
    logits: Tensor  # shape: [vocab_size], of the first new token, in which no draft is involved
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
    return Prefill(tuple(prompt), step.logits[-1], step.aux)


def decode_plain(
    session: VerifierSession, start: Prefill, budget: int, end_ids: Collection[int], rule: Rule = GREEDY
) -> Decoded:
    """The verifier's own decoding, one token per forward; the cache ends as it began."""
    clock = _Clock(start.aux.device)
    tokens = [rule.choose(start.logits)]
    while len(tokens) < budget and tokens[-1] not in end_ids:
        step = session.forward(tokens[-1:], states=False)
        tokens.append(rule.choose(step.logits[-1]))
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
    rule: Rule = GREEDY,
) -> Decoded:
    """Decoding with k drafted tokens per verification step; the cache ends as it began.

    The drafter has seen (g_i, x_{i+1}) for every verified position and proposes the k tokens that
    follow. The verifier runs over the newest token and the k proposals at once: the proposals that
    `rule` accepts are kept, and its choice after them is the bonus token. The draft's own
    prefill is part of `seconds`.
    """
    device = start.aux.device
    clock = _Clock(device)
    tokens, steps, num_cut = [rule.choose(start.logits)], list[int](), 0
    with torch.no_grad():
        drafter = make_drafter()
        drafter.extend(start.aux, torch.tensor([*start.prompt[1:], tokens[0]], device=device))
        while len(tokens) < budget and tokens[-1] not in end_ids:
            drafted, proposals = rule.propose(drafter, k)
            step = session.forward([tokens[-1], *drafted])
            emitted = rule.verify(step.logits, drafted, proposals)
            accepted = len(emitted) - 1
            session.crop(session.length - (k - accepted))
            steps.append(accepted)
            kept = until_end(emitted, end_ids, budget - len(tokens))
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
    """None when both are equal token by token; `tie` as of `judge`."""
    shared = num_shared(plain, drafted)
    if shared is None:
        return None
    if shared >= min(len(plain), len(drafted)):
        return judge(plain, drafted, shared, {}, tie)
    session.crop(0)
    logits = session.forward([*start.prompt, *plain[:shared]], num_logits=1, states=False).logits[-1].float()
    session.crop(len(start.prompt))
    return judge(plain, drafted, shared, dict(enumerate(logits.tolist())), tie)


def num_shared(plain: Sequence[int], drafted: Sequence[int]) -> int | None:
    """How many first tokens two texts share; None when they are equal."""
    if list(plain) == list(drafted):
        return None
    return next(
        (i for i, (a, b) in enumerate(zip(plain, drafted, strict=False)) if a != b),
        min(len(plain), len(drafted)),
    )


def judge(
    plain: Sequence[int], drafted: Sequence[int], shared: int, logits: Mapping[int, float], tie: float
) -> Difference:
    """The difference after `shared` tokens.

    Args:
        logits: of a fresh forward of the common text, by token id; without one of the two tokens, or none at
            all, the gap is unknown and no tie.
        tie: a gap within this share of the largest absolute logit counts as a near tie.
    """
    ends = [tokens[shared] if shared < len(tokens) else None for tokens in (plain, drafted)]
    if not all(end in logits for end in ends):
        return Difference(shared, ends[0], ends[1], None, False)
    gap = abs(logits[plain[shared]] - logits[drafted[shared]])
    return Difference(shared, ends[0], ends[1], gap, gap <= tie * max(map(abs, logits.values())))


def until_end(tokens: Sequence[int], end_ids: Collection[int], room: int) -> list[int]:
    """What of one step's tokens belongs to the text: up to the first end token, and no more than `room`."""
    end = next((i for i, token in enumerate(tokens) if token in end_ids), len(tokens))
    return list(tokens[: end + 1][:room])


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
