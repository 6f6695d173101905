"""Which split a conversation belongs to, and which conversations contain each other."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from eagle3lab.rows.rows import Conversation, prefix_digests

TRAIN = "train"
VALIDATION = "validation"


def split_of(conversation: Conversation, validation_share: float, seed: int) -> str:
    """Split by a hash of the opening user turn, decided before any fan-out into rows.

    Copies of a conversation, its prefixes and its continuations open alike, so they always share a
    side, whatever the share and the seed; adding data moves no conversation. White space around the opening
    does not count: templates trim it. The share is met in expectation, not exactly.
    """
    digest = hashlib.sha256(f"{seed}\n{opening(conversation)}".encode()).digest()
    return VALIDATION if int.from_bytes(digest[:8], "big") < validation_share * 2**64 else TRAIN


def opening(conversation: Conversation) -> str:
    """The first user turn without white space around it; without a user turn, the first message's."""
    users = [m["content"] for m in conversation.messages if m["role"] == "user"]
    return str(users[0] if users else conversation.messages[0]["content"]).strip()


def num_prefixes(conversations: Sequence[Conversation]) -> int:
    """How many different conversations are the beginning of a longer one."""
    whole = {conversation.conversation_id for conversation in conversations}
    begun: set[str] = set()
    for conversation in conversations:
        begun.update(prefix_digests(conversation.messages, conversation.tools)[:-1])
    return len(whole & begun)
