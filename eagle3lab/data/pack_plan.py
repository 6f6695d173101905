"""Which rows share a pack: a deterministic plan that does not know of ranks."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
from numpy.typing import NDArray

# measured on lognormal lengths: windows of 64 fill packs to 99 %, and below 1 % of packs repeat in the
# next epoch; windows as large as the data fill them a little better but repeat most packs
_MIN_WINDOW_ROWS, _MAX_WINDOW_ROWS = 8, 64
_MAX_OPEN_PACKS = 64


def shuffled(count: int, seed: int, epoch: int, stream: int) -> NDArray[np.int64]:
    """A permutation of range(count) that depends on (seed, epoch, stream) only.

    Sorted raw PCG64 output: numpy guarantees that stream over its versions, not that of `permutation`.
    """
    keys = np.random.PCG64(np.random.SeedSequence([seed, epoch, stream])).random_raw(count)
    return np.argsort(keys, kind="stable").astype(np.int64)


def pack_rows(lengths: NDArray[np.int64], max_len: int, order: NDArray[np.int64]) -> list[list[int]]:
    """Packs of row indices whose lengths sum to at most `max_len`; every row of `order` in exactly one.

    Best fit decreasing inside windows of `order`, so that which rows meet changes with the order and the
    time is O(n log n). The emptiest packs of a window stay open for the next one.
    """
    packs: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (tokens left, pack) of the open packs, sorted
    smallest = int(lengths[order].min()) if len(order) else 0
    size = min(max(len(order) // 8, _MIN_WINDOW_ROWS), _MAX_WINDOW_ROWS)
    for start in range(0, len(order), size):
        window = order[start : start + size]
        window = window[np.argsort(-lengths[window], kind="stable")]
        for row, length in zip(window.tolist(), lengths[window].tolist(), strict=True):
            at = bisect_left(room, (length,))
            if at == len(room):
                left, pack = max_len, len(packs)
                packs.append([row])
            else:
                left, pack = room.pop(at)
                packs[pack].append(row)
            if left - length >= smallest:
                insort(room, (left - length, pack))
        del room[:-_MAX_OPEN_PACKS]
    return packs
