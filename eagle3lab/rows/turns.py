"""Served prompt + completion: the ids and the mask of one conversation, by construction.

For every assistant turn t, in a conversation m:

    served prompt = ids of template(m[:t], with generation prompt)
    completion    = what template(m[:t + 1]) adds to it; supervised up to the end-of-turn token

No text is searched and no offset is used. The last turn's row supervises an earlier turn as well
exactly if it begins with that turn's own ids; a template that rewrites history (or tokens that merge
differently in a longer context) give the earlier turn a row of its own instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from eagle3lab.rows.render import Refused, decode, encode, render_text
from eagle3lab.rows.tokenizer import Tokenizer, template_text

REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class Rules:
    """What rendering and masking go by, besides the tokenizer itself."""

    arguments: dict[str, Any]  # of the template
    end_token_ids: frozenset[int]
    special_tokens: dict[str, int]
    bos_token_id: int | None = None


@dataclass(frozen=True)
class Completion:
    """One supervised turn."""

    prompt_text: str
    full_text: str  # of the conversation up to and including this turn
    prompt: list[int]
    completion: list[int]
    num_supervised: int  # leading tokens of `completion`, end-of-turn token included


@dataclass
class RawRow:
    """Ids, and the spans of them that are supervised, one per turn: [start, stop)."""

    input_ids: list[int]
    spans: list[tuple[int, int]]


@dataclass
class Turns:
    """What one conversation gave: rows, and why some of its turns are in none."""

    rows: list[RawRow] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)  # assistant turns, by reason
    repaired: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)
    detail: str = ""  # of a template error


def build_turns(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    rules: Rules,
) -> Turns:
    """Rows of one conversation, uncut, and the counts that belong to it.

    Reasons of `dropped`: `template_error`, `assistant_first` (no user turn before it),
    `empty_answer` (white space at most, and neither tool call nor reasoning),
    `boundary_unstable` (the rendered turn does not continue its served prompt),
    `empty_prompt`, `two_bos` (serving would be fed nothing, or begin with the BOS token twice),
    `template_not_deterministic` (the same messages rendered twice are not the same),
    `answer_not_rendered` (the template writes nothing for it; noted only if it writes an end token).
    """
    result = Turns()
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        result.dropped["no_assistant_turn"] += 1
        return result
    if answers[-1] != len(messages) - 1:
        messages = messages[: answers[-1] + 1]
        result.repaired["trailing_turns_cut"] += 1
    try:
        whole = render_text(tokenizer, messages, rules.arguments, tools, generation_prompt=False)
    except Refused as error:
        result.dropped["template_error"] += len(answers)
        result.detail = str(error)
        return result
    note_contents(tokenizer, messages, tools, rules, result.noted)

    completions: list[Completion] = []
    for index in answers:
        outcome = _completion(tokenizer, messages[: index + 1], tools, rules, result)
        if outcome is not None:
            completions.append(outcome)
    if completions and _rendered_again(tokenizer, messages, tools, rules, outcome) != whole:
        result.dropped["template_not_deterministic"] += len(completions)
        return result
    result.rows = group_turns(completions, rules.end_token_ids, result.noted)
    return result


def _completion(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    rules: Rules,
    result: Turns,
) -> Completion | None:
    """The last message as the verifier would emit it, or None with the reason counted."""
    *history, answer = messages
    if not any(message["role"] == "user" for message in history):
        result.dropped["assistant_first"] += 1
        return None
    if _is_empty(answer):
        result.dropped["empty_answer"] += 1
        return None
    try:
        prompt_text = render_text(tokenizer, history, rules.arguments, tools, generation_prompt=True)
        full_text = render_text(tokenizer, messages, rules.arguments, tools, generation_prompt=False)
    except Refused as error:
        result.dropped["template_error"] += 1
        result.detail = result.detail or str(error)
        return None
    prompt, full = encode(tokenizer, prompt_text), encode(tokenizer, full_text)
    if not prompt:
        result.dropped["empty_prompt"] += 1
        return None
    if rules.bos_token_id is not None and prompt[:2] == [rules.bos_token_id] * 2:
        result.dropped["two_bos"] += 1
        return None
    if full[: len(prompt)] == prompt:
        completion = full[len(prompt) :]
    else:
        separate = _separate(tokenizer, prompt_text, full_text, prompt, full)
        if separate is None:
            result.dropped["boundary_unstable"] += 1
            return None
        completion = separate
        result.noted["tokenized_at_boundary"] += 1
    if not completion:
        result.dropped["answer_not_rendered"] += 1
        return None
    length = _num_supervised(tokenizer, completion, rules, result.noted)
    ends = bool(length) and completion[length - 1] in rules.end_token_ids
    if not decode(tokenizer, completion[: length - ends]).strip():
        result.noted["answer_not_rendered"] += 1  # a call or reasoning the template leaves out
    return Completion(prompt_text, full_text, prompt, completion, length)


def _rendered_again(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    rules: Rules,
    last: Completion | None,
) -> str | None:
    """The whole conversation's text for a second time; the last turn has it, if it was not dropped."""
    if last is not None:
        return last.full_text
    try:
        return render_text(tokenizer, messages, rules.arguments, tools, generation_prompt=False)
    except Refused:
        return None


def _separate(
    tokenizer: Tokenizer, prompt_text: str, full_text: str, prompt: list[int], full: list[int]
) -> list[int] | None:
    """The completion tokenized on its own, where whole-text tokenization merges across the boundary.

    Serving sends the prompt's own ids, so the verifier starts a new token there. None when the
    turn does not continue the prompt, or when the pieces spell another text than the whole does
    (tokenizers that put a space before the first word).
    """
    if not full_text.startswith(prompt_text):
        return None
    completion = encode(tokenizer, full_text[len(prompt_text) :])
    return completion if decode(tokenizer, prompt + completion) == decode(tokenizer, full) else None


def _num_supervised(tokenizer: Tokenizer, completion: list[int], rules: Rules, noted: Counter[str]) -> int:
    """Length of the completion through its end-of-turn token, where generation would stop."""
    length = next((i + 1 for i, token in enumerate(completion) if token in rules.end_token_ids), None)
    if length is not None:
        if decode(tokenizer, completion[length:]).strip():
            noted["text_after_end_token"] += 1
        return length
    noted["no_end_token"] += 1
    # A special token the verifier's configuration does not list still ends a turn when only white
    # space, which is the template's, follows it.
    special = set(rules.special_tokens.values())
    last = next((i for i in reversed(range(len(completion))) if completion[i] in special), None)
    if last is not None and not decode(tokenizer, completion[last + 1 :]).strip():
        return last + 1
    return len(completion)


def group_turns(
    completions: Sequence[Completion], end_token_ids: frozenset[int], noted: Counter[str]
) -> list[RawRow]:
    """As few rows as possible: a turn joins a later turn's row that begins with its own ids.

    An end token that the template writes only once more turns follow is the verifier's in that row, too.
    """
    rows: list[RawRow] = []
    for turn in reversed(completions):
        start = len(turn.prompt)
        stop = start + turn.num_supervised
        own = turn.prompt + turn.completion
        host = next((row for row in rows if row.input_ids[:stop] == own[:stop]), None)
        if host is None:
            rows.insert(0, RawRow(own, [(start, stop)]))
        else:
            follows = host.input_ids[stop] if stop < len(host.input_ids) else None
            unended = own[stop - 1] not in end_token_ids and follows in end_token_ids
            host.spans.insert(0, (start, stop + unended))
    if len(rows) > 1:
        pairs = pairwise(completions)
        kept = all(later.prompt_text.startswith(turn.full_text) for turn, later in pairs)
        noted["history_retokenized" if kept else "history_rewriting"] += 1
    return rows


def _is_empty(answer: Mapping[str, Any]) -> bool:
    texts = [answer["content"], *(answer.get(key) for key in REASONING_KEYS)]
    return not answer.get("tool_calls") and not any(isinstance(t, str) and t.strip() for t in texts)


def note_contents(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: list[dict[str, Any]] | None,
    rules: Rules,
    noted: Counter[str],
) -> None:
    """Count what a reader of the report should know; nothing here touches ids or mask."""
    given = [message["content"] for message in messages if message["role"] != "assistant"]
    if any(token in content for token in rules.special_tokens for content in given):
        noted["control_tokens_in_text"] += 1
    template = template_text(tokenizer)
    if tools and "tools" not in template:
        noted["tools_not_rendered"] += 1
    if "add_generation_prompt" not in template:
        noted["no_generation_prompt"] += 1
