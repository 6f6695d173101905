"""Which rows run together: by length, so that little of a batch is padding."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PADDING_SHARE = 0.1  # of a batch; more is dearer than another forward pass
SMALL_BATCH_TOKENS = 512  # below this a forward pass is all overhead, whatever it pads


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Positions of the rows of every batch, longest rows first.

    Padded tokens, rows x longest, stay within `batch_tokens`; a longer row runs alone. The plan follows
    from the lengths of one shard only, so a resumed run forms the same batches and gives the same bytes.
    """
    batches: list[list[int]] = []
    width = filled = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        padded = (len(batches[-1]) + 1) * width if batches else 0
        mostly_padding = (
            padded > SMALL_BATCH_TOKENS and filled + lengths[i] < (1 - MAX_PADDING_SHARE) * padded
        )
        if not batches or padded > batch_tokens or mostly_padding:
            batches.append([])
            width, filled = lengths[i], 0
        batches[-1].append(i)
        filled += lengths[i]
    return batches


def padding_share(lengths: Sequence[int], batch_tokens: int) -> float:
    """Share of the forward passes' tokens that is padding."""
    padded = sum(len(batch) * lengths[batch[0]] for batch in plan_batches(lengths, batch_tokens))
    return 1 - sum(lengths) / padded if padded else 0.0
