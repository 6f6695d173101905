"""What a token loss weighs in its update's loss, from the plan's counts alone: no rank has to ask another."""

from __future__ import annotations

from collections.abc import Sequence

from eagle3lab.config.schema import Normalisation

Weights = tuple[float, ...]  # of one row, one per TTT step


def loss_weights(
    counts: Sequence[Sequence[Sequence[int]]], step_decay: float, normalisation: Normalisation
) -> list[list[Weights]]:
    """The weight of every token loss of row r of pack p at step k, `[p][r][k]`.

    counts: `[p][r][k]`, supervised tokens, over all packs of the update, those of other ranks too. The
    update's loss is the sum of weight * token loss; it is sum_k step_decay**k * L_k with, for step k,
    - token: L_k = sum of all token losses / all supervised tokens.
    - pack: L_k = mean over packs of (sum of the pack's token losses / its supervised tokens). A pack without
      any counts as 0 in that mean, as in speculators.
    - sequence: L_k = mean over the rows that have supervised tokens at k of (sum of the row's / its tokens).
    Where nothing is supervised the weight is 0, and so is the loss.
    """
    num_steps = len(counts[0][0])
    steps = range(num_steps)
    decay = [step_decay**k for k in steps]
    if normalisation is Normalisation.sequence:
        num_rows = [sum(row[k] > 0 for pack in counts for row in pack) for k in steps]
        return [
            [tuple(_share(decay[k], num_rows[k] * row[k]) for k in steps) for row in pack] for pack in counts
        ]
    of_pack = [tuple(sum(row[k] for row in pack) for k in steps) for pack in counts]
    if normalisation is Normalisation.pack:
        divisors = [tuple(len(counts) * n for n in totals) for totals in of_pack]
    else:
        divisors = [tuple(sum(column) for column in zip(*of_pack, strict=True))] * len(counts)
    return [
        [tuple(map(_share, decay, divisor))] * len(pack)
        for divisor, pack in zip(divisors, counts, strict=True)
    ]


def _share(weight: float, count: int) -> float:
    return weight / count if count else 0.0
