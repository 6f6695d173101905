"""The proof that a store's supervised tokens are the tokens that the verifier generated."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.store.answers import ANSWERS_FILE, Key, StoredAnswer, require_answers
from eagle3lab.store.identity import ids_sha256
from eagle3lab.store.reader import RowRecord, StoreReader

MAX_NAMED = 10


@dataclass(frozen=True)
class AnswersProof:
    """What was compared, id for id."""

    num_rows: int
    num_spans: int  # supervised stretches, each one answer
    num_tokens: int  # in them
    num_answers: int  # in the file, each in some row unless it is empty
    num_ended: int  # of them, by themselves

    def __str__(self) -> str:
        return (
            f"{self.num_spans:,} supervised stretches of {self.num_rows:,} rows ({self.num_tokens:,} tokens) are "
            f"generated answers, id for id and after their own prompts; {self.num_ended:,} of "
            f"{self.num_answers:,} answers ended by themselves"
        )


def check_answers(reader: StoreReader) -> AnswersProof:
    """Hold every supervised stretch of every row against the answers in `answers.jsonl`, and the other way round.

    A stretch must be the ids of the answer that was generated after exactly the ids before it.
    Raises IntegrityError naming row, position and both ids of each difference; UserError without answers.
    """
    answers = require_answers(reader.path).by_key
    by_prompt = {(answer.conversation, answer.prompt_sha256): answer for answer in answers.values()}
    problems: list[Problem] = []
    found: set[Key] = set()
    num_spans = num_tokens = 0
    for i, record in enumerate(reader.rows):
        ids, mask = reader.read_tokens(i)
        for start, stop in _stretches(mask):
            while start < stop:  # two answers touch where a template writes nothing between them
                answer = by_prompt.get((record.conversation_id, ids_sha256(ids[:start].tolist())))
                length = stop - start if answer is None else min(len(answer.token_ids), stop - start)
                stored = tuple(ids[start : start + length].tolist())
                problem = _difference(record, start, stored, answer)
                if problem is not None:
                    problems.append(problem)
                if answer is not None:
                    found.add(answer.key)
                num_spans += 1
                num_tokens += length
                start += length
    for key, answer in answers.items():
        if key not in found and len(answer.token_ids) > answer.ended:
            where = f"turn {answer.turn} of conversation {answer.conversation[:12]}"
            problems.append(Problem(f"{ANSWERS_FILE}: the answer to {where} is in no row"))
    if problems:
        more = [Problem(f"and {len(problems) - MAX_NAMED} more")] if len(problems) > MAX_NAMED else []
        raise IntegrityError(*problems[:MAX_NAMED], *more)
    num_ended = sum(answer.ended for answer in answers.values())
    return AnswersProof(len(reader), num_spans, num_tokens, len(answers), num_ended)


def _stretches(mask: Tensor) -> list[tuple[int, int]]:
    """[start, stop) of every run of ones."""
    stretches, at = [], 0
    for supervised, run in groupby(mask.tolist()):
        length = len(list(run))
        if supervised:
            stretches.append((at, at + length))
        at += length
    return stretches


def _difference(
    record: RowRecord, start: int, stored: tuple[int, ...], answer: StoredAnswer | None
) -> Problem | None:
    where = f"row {record.row_id[:12]} ({record.source})"
    if answer is None:
        return Problem(
            f"{where}: nothing was generated after its first {start} tokens, which are supervised on"
        )
    if stored == answer.token_ids:
        return None
    pairs = zip(stored, answer.token_ids, strict=False)
    at = next((i for i, (a, b) in enumerate(pairs) if a != b), len(stored))
    return Problem(
        f"{where}: token {start + at} is not the generated one (turn {answer.turn})",
        stored[at] if at < len(stored) else f"the stretch ends after {len(stored)} tokens",
        f"{answer.token_ids[at]} as in {ANSWERS_FILE}" if at < len(answer.token_ids) else "no token",
    )
