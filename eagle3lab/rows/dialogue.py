"""One conversation whose user turns the verifier answers itself: prompts out, generated ids in, rows at the end.

The served prompt of a turn is rendered from what went before, as in `turns`; the completion is what the
verifier generated, id for id. Generated ids are never tokenized again: their text only goes into the
history of the next prompt. A turn whose ids do not reappear in a later prompt (a template that drops
reasoning, text that tokenizes otherwise) has a row of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3lab.rows.build import Built, Recipe, add_row
from eagle3lab.rows.render import Message, Refused, decode, encode, render_text
from eagle3lab.rows.rows import Conversation
from eagle3lab.rows.tokenizer import Tokenizer
from eagle3lab.rows.turns import Completion, group_turns, note_contents
from eagle3lab.store.identity import ids_sha256


@dataclass(frozen=True)
class Prompt:
    """What the verifier is to answer."""

    conversation_id: str
    turn: int  # counted from 0
    token_ids: tuple[int, ...]
    max_new_tokens: int

    @property
    def sha256(self) -> str:
        """Of the ids, see `ids_sha256`."""
        return ids_sha256(self.token_ids)


def user_turns(messages: Sequence[Message]) -> tuple[list[list[Message]], bool]:
    """What is said before each answer, and whether a tool message ends the conversation.

    An answer is due after a user message that no other user message follows. Assistant messages are
    left out. A tool message is the result of a call that the new answer need not have made.
    """
    groups: list[list[Message]] = []
    said: list[Message] = []
    for message, following in zip(messages, [*messages[1:], None], strict=True):
        if message["role"] == "tool":
            return groups, True
        if message["role"] != "assistant":
            said.append(message)
        if message["role"] == "user" and (following is None or following["role"] != "user"):
            groups.append(said)
            said = []
    return groups, False


class Dialogue:
    """Ask for `prompt`, `answer` it, until there is none; then `built` holds the rows.

    Reasons in `turns_dropped`: `too_long` (the prompt leaves no room), `empty_answer` (nothing but the end
    token), those of `build_turns`, and `not_reached` for the user turns after the answer or prompt that
    ended the conversation early.
    """

    def __init__(
        self, conversation: Conversation, tokenizer: Tokenizer, recipe: Recipe, max_new_tokens: int
    ) -> None:
        self.conversation_id = conversation.conversation_id
        self.prompt: Prompt | None = None
        self.built = Built()
        self._tools = conversation.tools
        self._tokenizer, self._recipe, self._max_new_tokens = tokenizer, recipe, max_new_tokens
        self._groups, at_tool = user_turns(conversation.messages)
        self._history: list[Message] = []
        self._prompt_text = ""
        self._completions: list[Completion] = []
        if not self._groups:
            self.built.reason = "no_user_turn"
            return
        note_contents(tokenizer, conversation.messages, conversation.tools, recipe.rules, self.built.noted)
        replaced = sum(message["role"] == "assistant" for message in conversation.messages)
        if replaced:
            self.built.repaired["answers_replaced"] += replaced
        if at_tool:
            self.built.noted["ended_at_tool_message"] += 1
        elif len(conversation.messages) > replaced + sum(map(len, self._groups)):
            self.built.repaired["trailing_turns_cut"] += 1
        self._ask()

    def answer(self, token_ids: Sequence[int], ended: bool) -> None:
        """Take what the verifier generated for `prompt`; `ended`: by itself, the end token included.

        An answer that was cut is what the verifier emitted and stays supervised, but nothing can follow it.
        """
        assert self.prompt is not None, "nothing was asked"
        prompt, self.prompt = self.prompt, None
        text = decode(self._tokenizer, token_ids[: len(token_ids) - ended])
        if len(token_ids) == ended:
            self._end("empty_answer")
            return
        full_text = self._prompt_text + decode(self._tokenizer, token_ids)
        ids = list(token_ids)
        self._completions.append(
            Completion(self._prompt_text, full_text, list(prompt.token_ids), ids, len(ids))
        )
        if not ended:
            by_length = prompt.max_new_tokens < self._max_new_tokens
            self.built.noted["cut_at_max_len" if by_length else "cut_at_max_new_tokens"] += 1
            self._end()
        elif len(self._completions) < len(self._groups):
            self._history.append({"role": "assistant", "content": text})
            self._ask()
        else:
            self._end()

    def _ask(self) -> None:
        """The next prompt, or the end of the conversation with its reason."""
        turn = len(self._completions)
        self._history += self._groups[turn]
        rules = self._recipe.rules
        try:
            texts = [
                render_text(
                    self._tokenizer, self._history, rules.arguments, self._tools, generation_prompt=True
                )
                for _ in range(2)
            ]
        except Refused as error:
            self.built.detail = str(error)
            self._end("template_error")
            return
        ids = tuple(encode(self._tokenizer, texts[0]))
        room = self._recipe.max_len - len(ids)
        if texts[0] != texts[1]:
            self._end("template_not_deterministic")
        elif not ids:
            self._end("empty_prompt")
        elif rules.bos_token_id is not None and ids[:2] == (rules.bos_token_id,) * 2:
            self._end("two_bos")
        elif max(ids) >= self._recipe.vocab_size:
            self._end("token_outside_vocabulary")
        elif room < 1:
            self._end("too_long")
        else:
            self._prompt_text = texts[0]
            self.prompt = Prompt(self.conversation_id, turn, ids, min(self._max_new_tokens, room))

    def _end(self, reason: str = "") -> None:
        """No more prompts; `reason`: why the turn at hand is in no row."""
        if not self._completions:
            self.built.reason = reason
            return
        if reason:
            self.built.turns_dropped[reason] += 1
        not_reached = len(self._groups) - len(self._completions) - bool(reason)
        if not_reached:
            self.built.turns_dropped["not_reached"] += not_reached
        for row in group_turns(self._completions, self._recipe.rules.end_token_ids, self.built.noted):
            add_row(self.built, row, self._recipe)
