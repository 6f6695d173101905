"""What is counted while decoding with a draft, and what is said about it, each figure by its convention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from eagle3lab.evaluate.bootstrap import Tally, percentile_interval, resampled_lengths

RESAMPLES = 2_000


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counts over verification steps, each of which checked k drafted tokens.

    A step counts in full, also where the emitted text was cut inside it by the end token or the token
    budget. That is how vLLM counts (`spec_decode_num_drafts`, `_num_accepted_tokens_per_pos`).
    """

    drafts: int  # verification steps
    accepted_at: tuple[int, ...]  # steps in which the drafted token at position 0, 1, ... was accepted

    @classmethod
    def from_steps(cls, accepted: Sequence[int], k: int) -> AcceptanceCounts:
        """From the number of accepted tokens of every step."""
        return cls(len(accepted), tuple(sum(a > j for a in accepted) for j in range(k)))

    def __add__(self, other: AcceptanceCounts) -> AcceptanceCounts:
        if len(self.accepted_at) != len(other.accepted_at):
            raise ValueError("counts of another number of drafted tokens")
        added = tuple(a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True))
        return AcceptanceCounts(self.drafts + other.drafts, added)

    @property
    def accepted(self) -> int:
        """Accepted drafted tokens, bonus tokens not among them."""
        return sum(self.accepted_at)


@dataclass(frozen=True)
class AcceptanceStats:
    """Figures of a set of verification steps; None where nothing was counted."""

    num_prompts: int
    drafts: int
    accepted_at: tuple[int, ...]
    conditional_acceptance: tuple[float | None, ...]  # P(position j right | 0..j-1 right)
    unconditional_acceptance: tuple[float | None, ...]  # P(positions 0..j right)
    accepted_draft_tokens_per_step: float | None
    acceptance_length: (
        float | None
    )  # tokens per verification step with the bonus token: 1 + accepted / drafts
    acceptance_length_low: float | None  # 95 % bootstrap interval over prompts
    acceptance_length_high: float | None
    draft_acceptance_rate: float | None  # accepted / drafted tokens

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tally(runs: Sequence[Sequence[AcceptanceCounts]]) -> Tally:
    """What the bootstrap draws from: the runs of one variant, each over the same prompts."""
    return Tally(
        np.array([[float(p.drafts) for p in run] for run in runs]),
        np.array([[float(p.accepted) for p in run] for run in runs]),
    )


def summarise(prompts: Sequence[AcceptanceCounts], *, seed: int = 0) -> AcceptanceStats:
    """Statistics over prompts, pooled by verification step.

    Raises:
        ValueError: no prompt, or prompts decoded with different k.
    """
    total = sum(prompts[1:], prompts[0]) if prompts else None
    if total is None:
        raise ValueError("no counts to summarise")
    k, drafts, at = len(total.accepted_at), total.drafts, total.accepted_at
    reached = (drafts, *at[:-1])
    drawn = resampled_lengths([tally([prompts])], seed=seed, resamples=RESAMPLES)[0]
    low, high = percentile_interval(drawn) or (None, None)
    per_step = total.accepted / drafts if drafts else None
    return AcceptanceStats(
        num_prompts=len(prompts),
        drafts=drafts,
        accepted_at=at,
        conditional_acceptance=tuple(a / r if r else None for a, r in zip(at, reached, strict=True)),
        unconditional_acceptance=tuple(a / drafts if drafts else None for a in at),
        accepted_draft_tokens_per_step=per_step,
        acceptance_length=None if per_step is None else 1 + per_step,
        acceptance_length_low=low,
        acceptance_length_high=high,
        draft_acceptance_rate=total.accepted / (drafts * k) if drafts and k else None,
    )
