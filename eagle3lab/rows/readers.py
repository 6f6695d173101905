"""All conversations of a data configuration, normalised, in a reproducible order, and their account."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice

from eagle3lab.config.errors import Problem, raise_all
from eagle3lab.config.schema import DataConfig
from eagle3lab.rows.files import Record, check_paths, read_file
from eagle3lab.rows.normalise import (
    ENGINE_SEPARATOR,
    ROLES,
    Rejected,
    check_role_map,
    normalise,
    record_name,
    role_table,
)
from eagle3lab.rows.rows import Accounting, Conversation, canonical_json

MAX_PROBLEMS = 10


def read_conversations(
    data: DataConfig, part_separator: str = ENGINE_SEPARATOR
) -> tuple[list[Conversation], Accounting]:
    """Usable conversations of `data.paths`, at most `data.max_conversations` records read.

    Files take turns, one record each, so that a limit never starves the later ones; with
    `data.shuffle` each file is first ordered by a hash of `data.seed` and content. What lies beyond
    `max_conversations` is not read and not counted as read.

    Raises UserError for missing files, for malformed lines (unless `data.skip_malformed`, then they
    are counted) and for roles that neither the built-in table nor `data.role_map` knows.
    """
    raise_all(check_paths(data.paths) + check_role_map(data.role_map))
    account = Accounting()
    conversations: list[Conversation] = []
    roles, unknown_roles = role_table(data.role_map), Counter[str]()
    malformed: list[Record] = []
    seen: set[str] = set()
    for record in _records(data):
        account.read += 1
        if record.error is not None:
            malformed.append(record)
            account.drop("malformed", record.source, record.error)
            continue
        try:
            conversation, repaired = normalise(
                record.value, record.source, data.format, roles, unknown_roles, part_separator
            )
        except Rejected as rejected:
            account.drop(rejected.reason, record_name(record.value, record.source), rejected.detail)
            continue
        duplicate = conversation.conversation_id in seen
        seen.add(conversation.conversation_id)
        if duplicate and data.drop_duplicates:
            account.drop("duplicate", conversation.record_id)
            continue
        conversations.append(conversation)
        account.add({}, repaired, {"duplicate": 1} if duplicate else {})
    raise_all(_malformed_lines(malformed, data.skip_malformed) + _unknown_roles(unknown_roles))
    return conversations, account


def _records(data: DataConfig) -> Iterator[Record]:
    files: list[Iterable[Record]] = [read_file(spec) for spec in data.paths]
    if data.shuffle:
        files = [sorted(records, key=lambda record: _shuffle_key(record, data.seed)) for records in files]
    return islice(round_robin(files), data.max_conversations)


def round_robin(sources: Iterable[Iterable[Record]]) -> Iterator[Record]:
    """One record from each source in turn until all are exhausted."""
    turns = [iter(source) for source in sources]
    while turns:
        unfinished = []
        for turn in turns:
            record = next(turn, None)
            if record is not None:
                unfinished.append(turn)
                yield record
        turns = unfinished


def _shuffle_key(record: Record, seed: int) -> tuple[bytes, str]:
    # surrogatepass: a lone surrogate is rejected, with its reason, only after the shuffle
    content = f"{seed}\n{canonical_json(record.value)}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).digest(), record.source


def _malformed_lines(malformed: list[Record], skip: bool) -> list[Problem]:
    if skip:
        return []
    problems = [
        Problem(
            f"{record.source} is not JSON",
            record.error,
            "one JSON object on a line, or one JSON array",
            "data.skip_malformed=true",
        )
        for record in malformed[:MAX_PROBLEMS]
    ]
    if len(malformed) > MAX_PROBLEMS:
        problems.append(Problem(f"and {len(malformed) - MAX_PROBLEMS} more lines that are not JSON"))
    return problems


def _unknown_roles(unknown: Counter[str]) -> list[Problem]:
    if not unknown:
        return []
    counts = ", ".join(f"{role} ({count})" for role, count in unknown.items())
    pairs = ", ".join(f"{role}: ROLE" for role in unknown)
    what = f"data.paths: {len(unknown)} roles are not known"
    return [Problem(what, counts, f"roles mapped to {', '.join(ROLES)}", f"'data.role_map={{{pairs}}}'")]
