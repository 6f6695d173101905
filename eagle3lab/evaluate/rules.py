"""How a token is chosen and a drafted one verified: greedily, or sampled by exact rejection.

Both leave the text what the verifier alone would make it: greedily the same tokens, sampled the same
distribution of tokens, whatever the draft proposes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from eagle3lab.config.schema import Proposal


class Drafter(Protocol):
    """A draft model at work on one sequence; `eagle3lab.draft.inference.ChainDrafter` is one."""

    def extend(self, aux: Tensor, tokens: Tensor) -> object:
        """Take verified positions: aux states g_i [n, n_aux * hidden_size], next tokens x_{i+1} [n]."""
        ...

    def propose(self, num_tokens: int) -> list[int]:
        """The likeliest next tokens as verifier ids; leaves no trace in what `extend` has built."""
        ...

    def sample(
        self, num_tokens: int, temperature: float, generator: torch.Generator
    ) -> tuple[list[int], Tensor]:
        """Tokens drawn from the draft, as `propose`, and what they were drawn from [num_tokens, vocab_size]."""
        ...


class Rule(Protocol):
    """One text's way of choosing tokens; a sampling one is used for one text alone."""

    def choose(self, logits: Tensor) -> int:
        """The verifier's next token. logits: [vocab_size]"""
        ...

    def propose(self, drafter: Drafter, k: int) -> tuple[list[int], Tensor | None]:
        """k drafted tokens, and what they were drawn from; None: the draft's likeliest."""
        ...

    def verify(self, logits: Tensor, drafted: Sequence[int], proposals: Tensor | None) -> list[int]:
        """The accepted tokens and the verifier's own after them. logits: [k + 1, vocab_size]"""
        ...


class GreedyRule:
    """The likeliest token; a drafted one is accepted where it is that one."""

    def choose(self, logits: Tensor) -> int:
        return int(logits.argmax())

    def propose(self, drafter: Drafter, k: int) -> tuple[list[int], Tensor | None]:
        return drafter.propose(k), None

    def verify(self, logits: Tensor, drafted: Sequence[int], proposals: Tensor | None) -> list[int]:
        chosen = logits.argmax(-1).tolist()
        accepted = next((j for j, token in enumerate(drafted) if token != chosen[j]), len(drafted))
        return chosen[: accepted + 1]


class SamplingRule:
    """Tokens drawn at a temperature; drafted ones verified by rejection sampling.

    Drafted token x, drawn from q, is accepted with probability min(1, p(x) / q(x)); the first rejected one is
    replaced by a draw from the positive part of p - q (Leviathan et al. 2023; Chen et al. 2023). A greedy
    proposal is a q that is all on one token. All draws come from one generator, on the CPU.
    """

    def __init__(self, temperature: float, proposal: Proposal, seed: int) -> None:
        self._temperature = temperature
        self._proposal = proposal
        self._generator = torch.Generator().manual_seed(seed)

    def choose(self, logits: Tensor) -> int:
        return self._draw(self._probabilities(logits))

    def propose(self, drafter: Drafter, k: int) -> tuple[list[int], Tensor | None]:
        if self._proposal is Proposal.greedy:
            return drafter.propose(k), None
        return drafter.sample(k, self._temperature, self._generator)

    def verify(self, logits: Tensor, drafted: Sequence[int], proposals: Tensor | None) -> list[int]:
        p = self._probabilities(logits)  # shape: [k + 1, vocab_size]
        for j, token in enumerate(drafted):
            if proposals is None:
                q = torch.zeros_like(p[j])
                q[token] = 1.0
            else:
                q = proposals[j].to(p)
            if float(torch.rand((), generator=self._generator, dtype=p.dtype) * q[token]) < float(
                p[j, token]
            ):
                continue
            rest = (p[j] - q).clamp(min=0)
            # nothing is left where p and q differ by rounding alone: then a draw from p is the same
            return [*drafted[:j], self._draw(rest if bool(rest.any()) else p[j])]
        return [*drafted, self._draw(p[-1])]

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits.double().cpu() / self._temperature, dim=-1)

    def _draw(self, weights: Tensor) -> int:
        return int(torch.multinomial(weights, 1, generator=self._generator))


def make_rule(temperature: float, proposal: Proposal, seed: int) -> Rule:
    """Temperature 0 is greedy, and then nothing is drawn."""
    return SamplingRule(temperature, proposal, seed) if temperature else GreedyRule()
