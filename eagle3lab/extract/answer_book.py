"""The answers of one store while a run works with them: what is known, what is added, what is left in the end."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.engines.base import Answer, Answerer
from eagle3lab.extract.progress import say
from eagle3lab.rows.dialogue import Dialogue, Prompt
from eagle3lab.store.answers import (
    ANSWERS_FILE,
    ENGINE,
    REGENERATED,
    Answers,
    Header,
    StoredAnswer,
    append_answers,
    begin_answers,
    check_header,
    cut_torn_line,
    read_answers,
    write_answers,
)
from eagle3lab.store.files import sha256_of
from eagle3lab.store.manifest import is_store, read_manifest


class AnswerBook:
    """The answers of one store: those that are there, and those that are added."""

    def __init__(self, store: Path, header: Header, *, owner: bool, console: Console) -> None:
        self._store, self._owner = store, owner
        self._manifest = read_manifest(store) if is_store(store) else None
        expected = self._manifest.checksums.get(ANSWERS_FILE) if self._manifest else None
        if expected is not None and (digest := sha256_of(store / ANSWERS_FILE)) != expected:
            raise IntegrityError(Problem(f"{store / ANSWERS_FILE}: sha256", digest, expected))
        answers = read_answers(store) or Answers({}, {}, 0, torn=False)
        if answers.header:
            stored = {name: value for name, value in answers.header.items() if name != ENGINE}
            check_header(store, stored, header)
        if answers.torn and owner:
            cut_torn_line(store, answers)
            say(console, f"cut the last line of {ANSWERS_FILE}, torn by an interrupted run")
        self.header = header | {ENGINE: answers.header.get(ENGINE)}
        self.by_key = answers.by_key
        self._taken: dict[str, list[StoredAnswer]] = {}

    def replay(self, dialogue: Dialogue) -> Dialogue:
        """Give the dialogue the answers that are there. Raises IntegrityError for those to other prompts."""
        key = dialogue.conversation_id
        while dialogue.prompt is not None and (key, dialogue.prompt.turn) in self.by_key:
            answer = self.by_key[key, dialogue.prompt.turn]
            if answer.prompt_sha256 != dialogue.prompt.sha256:
                what = f"{self._store / ANSWERS_FILE}: conversation {key[:12]}, turn {answer.turn}, has another prompt"
                raise IntegrityError(Problem(what, answer.prompt_sha256, dialogue.prompt.sha256))
            self._taken.setdefault(key, []).append(answer)
            dialogue.answer(answer.token_ids, answer.ended)
        return dialogue

    def open(self, start: Callable[[], Answerer]) -> Answerer:
        """Start the engine that generates what is missing, and hold it against the one that began."""
        if self._manifest is not None:
            what = f"{self._store / ANSWERS_FILE} lacks answers that the store's rows are made of"
            raise IntegrityError(Problem(what, fix="delete the store and extract it again"))
        if not self._owner:
            raise UserError(
                Problem(
                    f"the answers of all parts are not in {self._store / ANSWERS_FILE} yet",
                    expected="the whole file, which part 0 generates for every part",
                    fix="extract.part=0 first; then this part again (on another machine: with a copy of that file)",
                )
            )
        engine = start()
        try:
            running = {"name": engine.name, **engine.versions()}
            if self.by_key:
                check_header(self._store, {ENGINE: self.header[ENGINE]}, {ENGINE: running})
            else:
                self.header[ENGINE] = running
                begin_answers(self._store, self.header)
        except BaseException:
            engine.close()
            raise
        return engine

    def keep(self, answers: Sequence[tuple[Prompt, Answer]]) -> None:
        """Put new answers on disk."""
        new = [StoredAnswer(p.conversation_id, p.turn, p.sha256, a.token_ids, a.ended) for p, a in answers]
        if new:
            append_answers(self._store, new)
        for answer in new:
            self._taken.setdefault(answer.conversation, []).append(answer)

    def close(self, used: Sequence[str]) -> dict[str, Any]:
        """Leave the answers of the conversations `used`, in this order; returns what the manifest says of them."""
        answers = [answer for key in used for answer in self._taken.get(key, [])]
        fixed = not self._owner or self._manifest is not None
        if write_answers(self._store, self.header, answers, dry=fixed) and fixed:
            raise IntegrityError(
                Problem(
                    f"{self._store / ANSWERS_FILE} holds other answers than the rows are made of",
                    fix="extract.part=0 once more" if self._manifest is None else "extract the store again",
                )
            )
        return {
            REGENERATED: True,
            "sampling": self.header["sampling"],
            "sampling_hash": self.header["sampling_hash"],
            "generated_by": self.header[ENGINE],
        }
