"""The draft vocabulary: which verifier tokens the draft can propose, and the two maps that say so.

`t2d` is a bool mask over the verifier's vocabulary; `d2t` holds offsets, not ids: draft row i means
verifier token `i + d2t[i]`. That is what speculators writes and what vLLM adds when it serves.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError


def mapping_fault(t2d: Tensor, d2t: Tensor) -> str | None:
    """What is wrong with a pair of maps, in one phrase; None when they fit each other.

    t2d: bool `[V]`. d2t: int64 `[Vd]`, offsets.
    """
    if t2d.dtype != torch.bool or t2d.ndim != 1:
        return f"t2d must be a bool vector, it is {t2d.dtype} of shape {tuple(t2d.shape)}"
    if d2t.dtype != torch.int64 or d2t.ndim != 1:
        return f"d2t must be an int64 vector, it is {d2t.dtype} of shape {tuple(d2t.shape)}"
    num_true, size, verifier_size = int(t2d.sum()), d2t.numel(), t2d.numel()
    ids = torch.arange(size) + d2t.cpu()
    outside = (ids < 0) | (ids >= verifier_size)
    if outside.any():
        i = int(outside.nonzero()[0])
        return (
            f"d2t holds no offsets: index {i} + {int(d2t[i])} = {int(ids[i])} lies outside "
            f"the verifier's vocabulary of {verifier_size}"
        )
    if num_true != size:
        return f"t2d has {num_true} true entries, d2t has {size}"
    if size > 1 and not bool((ids[1:] > ids[:-1]).all()):
        return "d2t does not lead to strictly increasing verifier ids"
    if not bool(t2d.cpu()[ids].all()):
        return "d2t leads to verifier ids that t2d does not mark"
    return None


@dataclass(frozen=True, eq=False)
class DraftVocabulary:
    """The two maps of a draft vocabulary, checked against each other on construction.

    `num_filled` counts rows taken by lowest free id because too few distinct tokens were counted.
    Raises ValueError when the maps do not fit each other.
    """

    t2d: Tensor  # shape: [V], bool
    d2t: Tensor  # shape: [Vd], int64 offsets
    num_filled: int = 0

    def __post_init__(self) -> None:
        fault = mapping_fault(self.t2d, self.d2t)
        if fault is not None:
            raise ValueError(fault)

    @classmethod
    def full(cls, verifier_size: int) -> DraftVocabulary:
        """The verifier's whole vocabulary: every token can be drafted."""
        return cls(torch.ones(verifier_size, dtype=torch.bool), torch.zeros(verifier_size, dtype=torch.int64))

    @classmethod
    def from_ids(cls, ids: Collection[int], verifier_size: int, num_filled: int = 0) -> DraftVocabulary:
        """A vocabulary of the given verifier ids, in ascending order."""
        selected = torch.tensor(sorted(ids), dtype=torch.int64)
        t2d = torch.zeros(verifier_size, dtype=torch.bool)
        t2d[selected] = True
        return cls(t2d, selected - torch.arange(selected.numel()), num_filled)

    @classmethod
    def from_counts(
        cls, counts: Tensor, size: int | None, *, always_keep: Collection[int] = ()
    ) -> DraftVocabulary:
        """The `size` most frequent tokens; of equal counts the lower id first.

        counts: int64 `[V]`, V the model's vocabulary size (not the tokenizer's length). Ids in
        `always_keep` come first whatever their count. Too few distinct tokens are filled up with the
        lowest free ids, as speculators does, and counted in `num_filled`. `size` None or V: no pruning.
        Raises UserError for a size that cannot be had.
        """
        verifier_size = counts.numel()
        if size is None or size == verifier_size:
            return cls.full(verifier_size)
        if not max(1, len(set(always_keep))) <= size < verifier_size:
            raise UserError(
                Problem(
                    "draft.vocab_size does not fit the verifier's vocabulary",
                    size,
                    f"{max(1, len(set(always_keep)))} to {verifier_size}, or null for all of it",
                    "draft.vocab_size=null",
                )
            )
        counts = counts.cpu()
        if int(counts.min()) < 0:
            raise ValueError("token counts are negative")
        if int(counts.sum()) == 0:
            raise UserError(
                Problem(
                    "no supervised token was counted, so no draft vocabulary can be chosen",
                    expected="a store with supervised tokens in its train split",
                    fix="draft.vocab_size=null",
                )
            )
        chosen = dict.fromkeys(always_keep)
        by_count = torch.sort(counts, descending=True, stable=True).indices
        num_counted = int((counts > 0).sum())
        for token_id in by_count[:num_counted].tolist():
            if len(chosen) == size:
                break
            chosen.setdefault(token_id)
        num_filled = size - len(chosen)
        for token_id in range(verifier_size):
            if len(chosen) == size:
                break
            chosen.setdefault(token_id)
        return cls.from_ids(chosen, verifier_size, num_filled)

    @property
    def size(self) -> int:
        return self.d2t.numel()

    @property
    def verifier_size(self) -> int:
        return self.t2d.numel()

    @property
    def is_full(self) -> bool:
        return self.size == self.verifier_size

    @property
    def verifier_ids(self) -> Tensor:
        """The verifier id of every draft row, ascending. shape: [Vd]"""
        return self.d2t + torch.arange(self.size, device=self.d2t.device)

    def to_verifier(self, draft_ids: Tensor) -> Tensor:
        """Verifier ids of draft ids, on the device of `draft_ids`; any shape."""
        return draft_ids + self.d2t.to(draft_ids.device)[draft_ids]

    def to_draft(self, verifier_ids: Tensor) -> Tensor:
        """Draft ids of verifier ids, -1 where a token is outside the vocabulary; any shape."""
        t2d = self.t2d.to(verifier_ids.device)
        rank = t2d.cumsum(0) - 1
        return torch.where(t2d[verifier_ids], rank[verifier_ids], -1)

    def coverage(self, counts: Tensor) -> float:
        """Share of counted tokens that the draft could propose. counts: `[V]`. NaN when none is counted."""
        total = int(counts.sum())
        return int(counts[self.t2d.to(counts.device)].sum()) / total if total else float("nan")

    def coverage_of(self, verifier_ids: Tensor) -> float:
        """Share of these verifier ids that the draft could propose; any shape. NaN when there is none."""
        if verifier_ids.numel() == 0:
            return float("nan")
        return float(self.t2d.to(verifier_ids.device)[verifier_ids].double().mean())

    def same_as(self, other: DraftVocabulary) -> bool:
        """Whether every draft row means the same verifier token in both."""
        return torch.equal(self.t2d.cpu(), other.t2d.cpu()) and torch.equal(self.d2t.cpu(), other.d2t.cpu())
