"""What the room hands on: conversations, rows, and the account of everything that was read."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_EXAMPLES = 5

# Dropped on request, not for a fault of theirs: `data.strict` does not stop at these.
REASONS_WITHOUT_FAULT = frozenset({"duplicate", "beyond_max_tokens"})


@dataclass(frozen=True)
class Conversation:
    """One normalised conversation: roles and contents are text, absent keys stay absent."""

    conversation_id: str  # sha256 of tools and messages
    messages: tuple[dict[str, Any], ...]
    tools: list[dict[str, Any]] | None
    source: str  # "file:line", the file as the configuration names it
    record_id: str  # the record's own id, else `source`


@dataclass(frozen=True)
class Row:
    """What the verifier is fed and where it would have written the token itself."""

    row_id: str
    conversation_id: str
    source: str
    split: str  # "train" or "validation"
    input_ids: tuple[int, ...]  # shape: [T]
    loss_mask: tuple[int, ...]  # shape: [T]; 1 = supervised


@dataclass
class Accounting:
    """Counts by reason. In conversations: `read == kept + sum(dropped.values())`."""

    read: int = 0
    kept: int = 0  # gave at least one row
    rows: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    turns_dropped: dict[str, int] = field(default_factory=dict)  # unsupervised answers of kept conversations
    repaired: dict[str, int] = field(default_factory=dict)  # changed before use
    noted: dict[str, int] = field(default_factory=dict)  # worth knowing, nothing changed
    examples: dict[str, list[str]] = field(default_factory=dict)  # reason -> record ids
    details: dict[str, str] = field(default_factory=dict)  # reason -> the first message

    def drop(self, reason: str, record_id: str, detail: str = "") -> None:
        """Count one dropped conversation and remember the first few by id."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1
        known = self.examples.setdefault(reason, [])
        if len(known) < MAX_EXAMPLES:
            known.append(record_id)
        if detail:
            self.details.setdefault(reason, detail)

    def add(
        self, turns_dropped: Mapping[str, int], repaired: Mapping[str, int], noted: Mapping[str, int]
    ) -> None:
        """Add the counts of one kept conversation."""
        for mine, theirs in (
            (self.turns_dropped, turns_dropped),
            (self.repaired, repaired),
            (self.noted, noted),
        ):
            for reason, count in theirs.items():
                mine[reason] = mine.get(reason, 0) + count

    def balanced(self) -> bool:
        """Whether every conversation read is either kept or dropped for a counted reason."""
        return self.read == self.kept + sum(self.dropped.values())

    def as_dict(self) -> dict[str, Any]:
        """Plain data for a manifest, keys sorted so that equal accounts give equal bytes."""
        return {
            "read": self.read,
            "kept": self.kept,
            "rows": self.rows,
            **{
                name: dict(sorted(getattr(self, name).items()))
                for name in ("dropped", "turns_dropped", "repaired", "noted", "examples", "details")
            },
        }

    def lines(self) -> list[str]:
        """The account for people, one line per kind of count."""
        text = [f"conversations: {self.read} read = {self.kept} kept + {sum(self.dropped.values())} dropped"]
        text[0] += f"; {self.rows} rows"
        for name in ("dropped", "turns_dropped", "repaired", "noted"):
            counts = sorted(getattr(self, name).items())
            if counts:
                text.append(f"  {name.replace('_', ' ')}: " + ", ".join(f"{r} {n}" for r, n in counts))
        faults = {r: ids for r, ids in self.examples.items() if r not in REASONS_WITHOUT_FAULT}
        for reason, ids in sorted(faults.items()):
            text.append(
                f"  {reason}: {', '.join(ids)}"
                + (f" ({self.details[reason]})" if reason in self.details else "")
            )
        return text


@dataclass(frozen=True)
class RowSet:
    """All rows of one configuration, and what they were made with."""

    rows: tuple[Row, ...]
    user_turns: frozenset[int]  # `text_key`s of what users say in the conversations of the training split
    accounting: Accounting
    tokenizer_hash: str
    template_hash: str
    template_args_hash: str
    end_token_ids: tuple[int, ...]
    max_len: int  # the cap that applied: data.max_len or the verifier's own limit

    @property
    def num_tokens(self) -> int:
        return sum(len(row.input_ids) for row in self.rows)

    @property
    def num_supervised(self) -> int:
        return sum(sum(row.loss_mask) for row in self.rows)

    def num_rows(self, split: str) -> int:
        return sum(row.split == split for row in self.rows)


def canonical_json(value: Any) -> str:
    """Compact JSON in the order given: templates may print keys, so their order is content."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def sha256_text(text: str) -> str:
    """Hex digest of the UTF-8 bytes. Raises UnicodeEncodeError on a lone surrogate."""
    return hashlib.sha256(text.encode("utf-8")).hexdigest()


def prefix_digests(messages: Iterable[Mapping[str, Any]], tools: Any = None) -> list[str]:
    """Running digests of a conversation: entry k covers the tools and the first k + 1 messages.

    The last entry is the conversation's id; a shorter conversation is a prefix of a longer one
    exactly if its id is among the longer one's entries.
    """
    running = sha256_text(canonical_json(tools))
    digests = []
    for message in messages:
        running = sha256_text(running + canonical_json(message))
        digests.append(running)
    return digests


def supervised_counts(rows: Iterable[Row]) -> Counter[int]:
    """How often each token id is supervised."""
    return Counter(
        token
        for row in rows
        for token, supervised in zip(row.input_ids, row.loss_mask, strict=True)
        if supervised
    )
