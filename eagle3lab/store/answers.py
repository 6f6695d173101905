"""`answers.jsonl`: what the verifier generated, token id for token id. The first line says under which settings.

While answers are generated, lines are added in any order and fsynced; when all are there the file is
written once more in the order of the conversations, so that its bytes do not depend on how the work was
cut into requests and runs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import DAMAGED_JSON, IntegrityError, Problem, UserError, raise_all
from eagle3lab.store.files import append_durably, write_text

ANSWERS_FILE = "answers.jsonl"
FORMAT = "eagle3lab-answers"
FORMAT_VERSION = 1
REGENERATED = "regenerated"  # among the row settings of a manifest: whether its rows are made of answers
ENGINE = "engine"  # the one field of a header that is known only once an engine runs

Header = dict[str, Any]
Key = tuple[str, int]  # conversation id, turn


@dataclass(frozen=True)
class StoredAnswer:
    """One line: the answer to one user turn."""

    conversation: str
    turn: int
    prompt_sha256: str  # of the served prompt's ids, little-endian int64
    token_ids: tuple[int, ...]  # the end token included
    ended: bool  # by itself

    @property
    def key(self) -> Key:
        return self.conversation, self.turn

    def to_line(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":")) + "\n"

    @classmethod
    def from_line(cls, line: bytes) -> StoredAnswer:
        """Raises ValueError when the line is not one whole answer."""
        try:
            values = json.loads(line)
            answer = cls(**{**values, "token_ids": tuple(values["token_ids"])})
            ids = answer.token_ids
            texts = isinstance(answer.conversation, str) and isinstance(answer.prompt_sha256, str)
            numbers = all(type(value) is int for value in (answer.turn, *ids))
            if not (texts and numbers and isinstance(answer.ended, bool) and ids):
                raise ValueError("a value of another kind")
        except DAMAGED_JSON as error:
            raise ValueError(str(error)) from error
        return answer


@dataclass
class Answers:
    """What the file holds."""

    header: Header
    by_key: dict[Key, StoredAnswer]
    whole_bytes: int  # up to the last whole line
    torn: bool  # whether a line that a kill cut off follows


def answers_files(row_settings: Mapping[str, Any]) -> list[str]:
    """The file of answers, where a store's rows are made of them: a file that the manifest vouches for."""
    return [ANSWERS_FILE] if row_settings.get(REGENERATED) else []


def read_answers(store: Path) -> Answers | None:
    """The answers of the store in `store`; None when there is not even a whole header.

    Raises IntegrityError for a damaged line, an answer that stands twice, or another kind of file.
    """
    path = store / ANSWERS_FILE
    if not path.exists():
        return None
    *lines, rest = path.read_bytes().split(b"\n")
    if not lines:
        return None
    try:
        header = json.loads(lines[0])
        if header.pop("format") != FORMAT or header.pop("format_version") != FORMAT_VERSION:
            raise ValueError(f"not {FORMAT} {FORMAT_VERSION}")
    except DAMAGED_JSON as error:
        raise IntegrityError(Problem(f"{path} does not begin as a file of answers ({error})")) from error
    by_key: dict[Key, StoredAnswer] = {}
    for number, line in enumerate(lines[1:], 2):
        try:
            answer = StoredAnswer.from_line(line)
            if answer.key in by_key:
                raise ValueError("the same turn stands twice")
        except ValueError as error:
            raise IntegrityError(Problem(f"{path} line {number} is damaged ({error})")) from error
        by_key[answer.key] = answer
    return Answers(header, by_key, sum(len(line) + 1 for line in lines), bool(rest))


def begin_answers(store: Path, header: Header) -> None:
    """Write a file without answers, at once or not at all."""
    write_text(store / ANSWERS_FILE, _header_line(header))


def append_answers(store: Path, answers: Iterable[StoredAnswer]) -> None:
    """Add answers and fsync them."""
    append_durably(store / ANSWERS_FILE, "".join(answer.to_line() for answer in answers).encode())


def cut_torn_line(store: Path, answers: Answers) -> None:
    """Remove what a kill left of a line at the end."""
    path = store / ANSWERS_FILE
    whole = path.read_bytes()[: answers.whole_bytes].decode()
    write_text(path, whole)


def write_answers(store: Path, header: Header, answers: Iterable[StoredAnswer], *, dry: bool = False) -> bool:
    """Write the whole file in the order given; returns False when its bytes were these already.

    `dry`: only compare.
    """
    text = _header_line(header) + "".join(answer.to_line() for answer in answers)
    path = store / ANSWERS_FILE
    if path.is_file() and path.read_bytes() == text.encode():
        return False
    if not dry:
        write_text(path, text)
    return True


def check_header(store: Path, stored: Header, wanted: Header) -> None:
    """Raise UserError naming every field in which the stored answers are not those that are wanted.

    The hash of the sampling follows from its fields, which are named one by one.
    """
    old, new = _flat(stored), _flat(wanted)
    problems = [
        Problem(
            f"{store / ANSWERS_FILE} was generated with another {name}",
            old.get(name),
            f"{new.get(name)!r} as now",
        )
        for name in sorted({*old, *new} - {"sampling_hash"})
        if old.get(name) != new.get(name)
    ]
    if problems:
        fix = "store=ANOTHER_DIRECTORY, or delete this one, or undo the change"
        last = problems[-1]
        problems[-1] = Problem(last.what, last.value, last.expected, fix)
    raise_all(problems)


def require_answers(store: Path) -> Answers:
    """The answers of a finished store. Raises UserError when it has none, IntegrityError for a damaged file."""
    answers = read_answers(store)
    if answers is None:
        raise UserError(
            Problem(f"{store} holds no answers of the verifier", fix="a store made with data.regenerate=true")
        )
    if answers.torn:
        raise IntegrityError(Problem(f"{store / ANSWERS_FILE}: its last line is torn"))
    return answers


def _header_line(header: Mapping[str, Any]) -> str:
    values = {"format": FORMAT, "format_version": FORMAT_VERSION, **header}
    return json.dumps(values, sort_keys=True, separators=(",", ":")) + "\n"


def _flat(header: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted names; tuples as JSON would give them back."""
    flat: dict[str, Any] = {}
    for name, value in header.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
