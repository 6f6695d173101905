"""Which positions of a row need the verifier's last state, for a store that keeps no others."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def kept_positions(loss_mask: Tensor) -> Tensor:
    """Where the last state of a row can be a training target, under any rule of `loss.supervision`.

    loss_mask: [T], non-zero where the verifier itself would emit token p. Returns bool [T]. The last state of p
    predicts token p + 1, so the rules ask for it where token p is supervised, or p + 1, or both; every TTT
    step has its targets among those. Never at position 0: the shift to training samples leaves it out.
    """
    emitted = loss_mask != 0
    kept = emitted.clone()
    kept[:-1] |= emitted[1:]
    kept[:1] = False
    return kept


def num_kept(loss_mask: Sequence[int]) -> int:
    """How many positions of a row `kept_positions` marks."""
    return int(kept_positions(torch.frombuffer(bytearray(loss_mask), dtype=torch.uint8)).sum())


def spread(states: Tensor, kept: Tensor) -> Tensor:
    """States [M, hidden] at the M marked positions of [T, hidden], zeros elsewhere."""
    whole = states.new_zeros(len(kept), states.shape[1])
    whole[kept] = states
    return whole
