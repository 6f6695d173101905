"""Seeds for the noise of one pack, from run seed, epoch and rows: there is no state to save or share."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


def pack_seed(seed: int, epoch: int, rows: Sequence[int]) -> int:
    """A 63-bit seed of this pack in this epoch, the same on any rank, worker or resumed run."""
    content = struct.pack(f"<{2 + len(rows)}q", seed, epoch, *rows)
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little") >> 1
