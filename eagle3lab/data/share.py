"""A share of the conversations, the same in every run and contained in every larger share."""

from __future__ import annotations

import hashlib


def in_share(conversation_id: str, share: float) -> bool:
    """Whether a conversation is among `share` of all, by a hash of its id.

    All rows of a conversation are in it or none is. The share is met in expectation, not exactly.
    """
    digest = hashlib.sha256(f"data_share\n{conversation_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
