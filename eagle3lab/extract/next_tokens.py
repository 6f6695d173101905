"""The alignment test of a store whose verifier fits nowhere here: do its last states predict its own tokens?

It needs the final norm and the head alone. It finds states that lie beside their tokens, and states that are not the
last layer's or not this verifier's; the aux layers cannot be tested without a forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.engines.base import States
from eagle3lab.verifier.weights import EdgeWeights, verifier_logits

# of the nats of a blind guess: text costs a large model far less, the shipped one of 0.9 M parameters 0.55 of them
CHANCE_SHARE = 2 / 3
_OFFSETS = (0, 1, 2)


@dataclass(frozen=True)
class NextTokens:
    """Nats that the logits of a position give, on average, to the token there, to the next and to the one after."""

    rows: int
    tokens: int
    chance: float  # of a blind guess
    same: float
    following: float
    after_next: float

    @property
    def suspect(self) -> str | None:
        """What seems wrong; None where the next token is the likeliest of the three, and likely."""
        if not self.tokens:
            return "no position has a last state and two tokens after it"
        if not min(self.same, self.following, self.after_next) <= CHANCE_SHARE * self.chance:
            return "they are another layer's, another verifier's, or of text that the verifier finds random"
        if self.following < min(self.same, self.after_next):
            return None
        behind = self.same < self.after_next
        return f"states lie one position {'behind' if behind else 'before'} their tokens"

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, {self.tokens} tokens: next token {self.following:.2f} nats, the token itself "
            f"{self.same:.2f}, the one after next {self.after_next:.2f}, a blind guess {self.chance:.2f}"
        )


def measure_next_tokens(
    samples: Sequence[States], kept: Sequence[Tensor], edge: EdgeWeights, *, eps: float, vocab_size: int
) -> NextTokens:
    """kept: bool [T] of every sample, where its last state is one."""
    nats: list[Tensor] = []  # each of shape: [n, 3]
    for states, marked in zip(samples, kept, strict=True):
        places = marked[: -max(_OFFSETS)].nonzero().flatten()
        log_p = verifier_logits(states.last[places].float(), edge, eps).float().log_softmax(-1)
        wanted = torch.stack([states.token_ids[places + k] for k in _OFFSETS], dim=1)
        nats.append(-log_p.gather(1, wanted.long()))
    joined = torch.cat(nats)
    same, following, after_next = joined.mean(dim=0).tolist()
    return NextTokens(len(samples), len(joined), math.log(vocab_size), same, following, after_next)


def require_next_tokens(found: NextTokens, *, where: str, fix: str) -> None:
    """Raise IntegrityError with the figures and the suspect."""
    if found.suspect is None:
        return
    raise IntegrityError(
        Problem(
            f"the last states of {where} do not predict its tokens: {found.suspect}",
            str(found),
            f"the next token likelier than its neighbours and within {CHANCE_SHARE:.0%} of a blind guess",
            fix,
        )
    )
