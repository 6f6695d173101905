"""Rows of generated ids, turn by turn; the expected ids are spelt out byte by byte, without any tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.schema import DataConfig, DataFormat, ModelConfig
from eagle3lab.rows.build import make_recipe
from eagle3lab.rows.dialogue import Dialogue
from eagle3lab.rows.normalise import normalise, role_table
from eagle3lab.rows.tokenizer import load_tokenizer

SPECIAL = {"<|bos|>": 256, "<|turn|>": 257, "<|end|>": 258, "<think>": 259, "</think>": 260}
END = 258
STRIPPING = (
    "{%- for m in messages -%}{{- '<|turn|>' + m.role + '\\n' + m.content.split('</think>')[-1] + '<|end|>\\n' -}}"
    "{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|turn|>assistant\\n' -}}{%- endif -%}"
)


def ids(text: str) -> list[int]:
    """Bytes, and the special tokens by their text."""
    pieces = re.split("(" + "|".join(map(re.escape, SPECIAL)) + ")", text)
    return [i for piece in pieces for i in ([SPECIAL[piece]] if piece in SPECIAL else piece.encode())]


@pytest.fixture
def begin(shared: Path, facts: Any, tmp_path: Path) -> Callable[..., Dialogue]:
    def make(*turns: tuple[str, str], template: str = "", max_len: int = 200, max_new: int = 40) -> Dialogue:
        path = shared / "templates" / "plain.jinja"
        if template:
            path = tmp_path / "template.jinja"
            path.write_text(template)
        model = ModelConfig(name="t", tokenizer=str(shared / "tok_bytes"), template=str(path))
        tokenizer = load_tokenizer(model, facts.path)
        recipe = make_recipe(DataConfig(name="t", max_len=max_len), model, facts, tokenizer)
        record = {"messages": [{"role": role, "content": content} for role, content in turns]}
        conversation, _ = normalise(record, "f:1", DataFormat.auto, role_table({}), {})  # type: ignore[arg-type]
        return Dialogue(conversation, tokenizer, recipe, max_new)

    return make


def asked(dialogue: Dialogue) -> list[int]:
    assert dialogue.prompt is not None
    return list(dialogue.prompt.token_ids)


def supervised(dialogue: Dialogue) -> list[list[list[int]]]:
    """Every row's supervised stretches."""
    result = []
    for row, mask in dialogue.built.rows:
        text = "".join(map(str, mask))
        result.append([list(row[m.start() : m.end()]) for m in re.finditer("1+", text)])
    return result


FIRST = ids("<|turn|>user\nhi<|end|>\n<|turn|>assistant\n")


def test_every_user_turn_is_answered_in_one_row_when_history_is_kept(begin: Callable[..., Dialogue]) -> None:
    dialogue = begin(("user", "hi"), ("assistant", "OLD"), ("user", "more"), ("assistant", "OLD TOO"))
    assert asked(dialogue) == FIRST
    dialogue.answer([*b"yes", END], True)
    second = [*FIRST, *b"yes", END, *ids("\n<|turn|>user\nmore<|end|>\n<|turn|>assistant\n")]
    assert asked(dialogue) == second
    dialogue.answer([*b"no", END], True)
    assert dialogue.prompt is None
    ((row, mask),) = dialogue.built.rows
    assert list(row) == [*second, *b"no", END]
    assert supervised(dialogue) == [[[*b"yes", END], [*b"no", END]]]
    assert len(mask) == len(row)
    assert dialogue.built.repaired == {"answers_replaced": 2}
    assert not dialogue.built.turns_dropped


def test_a_template_that_drops_reasoning_gives_the_earlier_turn_its_own_row(
    begin: Callable[..., Dialogue],
) -> None:
    dialogue = begin(("user", "hi"), ("assistant", "-"), ("user", "more"), template=STRIPPING)
    thought = [259, *b"hm", 260, *b"yes", END]
    dialogue.answer(thought, True)
    second = [*FIRST, *b"yes", END, *ids("\n<|turn|>user\nmore<|end|>\n<|turn|>assistant\n")]
    assert asked(dialogue) == second
    dialogue.answer([*b"no", END], True)
    rows = [list(row) for row, _ in dialogue.built.rows]
    assert rows == [[*FIRST, *thought], [*second, *b"no", END]]
    assert supervised(dialogue) == [[thought], [[*b"no", END]]]
    assert dialogue.built.noted["history_rewriting"] == 1


def test_generated_ids_stay_although_their_text_is_tokenized_otherwise(
    begin: Callable[..., Dialogue],
) -> None:
    spelt = [*b"<think>x", 255, END]  # seven bytes where a tokenizer has one id, and a byte that is no UTF-8
    dialogue = begin(("user", "hi"), ("user", "hello"), ("assistant", "-"), ("user", "more"))
    first = asked(dialogue)
    assert first == ids("<|turn|>user\nhi<|end|>\n<|turn|>user\nhello<|end|>\n<|turn|>assistant\n")
    dialogue.answer(spelt, True)
    assert 259 in asked(dialogue)
    dialogue.answer([*b"no", END], True)
    assert supervised(dialogue) == [[spelt], [[*b"no", END]]]
    assert list(dialogue.built.rows[0][0]) == [*first, *spelt]
    assert dialogue.built.noted["history_retokenized"] == 1


@pytest.mark.parametrize("max_len", [200, len(FIRST) + 3])
def test_an_answer_that_was_cut_is_supervised_and_ends_the_conversation(
    begin: Callable[..., Dialogue], max_len: int
) -> None:
    dialogue = begin(("user", "hi"), ("assistant", "-"), ("user", "more"), max_len=max_len, max_new=5)
    assert dialogue.prompt is not None
    room = dialogue.prompt.max_new_tokens
    assert room == min(5, max_len - len(FIRST))
    dialogue.answer([*b"yes it is"][:room], False)
    assert dialogue.prompt is None
    assert supervised(dialogue) == [[[*b"yes it is"][:room]]]
    reason = "cut_at_max_new_tokens" if room == 5 else "cut_at_max_len"
    assert dialogue.built.noted == {reason: 1}
    assert dialogue.built.turns_dropped == {"not_reached": 1}


def test_an_empty_answer_is_dropped_and_ends_the_conversation(begin: Callable[..., Dialogue]) -> None:
    only = begin(("user", "hi"), ("assistant", "-"), ("user", "more"))
    only.answer([END], True)
    assert only.prompt is None
    assert (only.built.rows, only.built.reason) == ([], "empty_answer")
    second = begin(("user", "a"), ("assistant", "-"), ("user", "b"), ("assistant", "-"), ("user", "c"))
    second.answer([*b"yes", END], True)
    second.answer([END], True)
    assert supervised(second) == [[[*b"yes", END]]]
    assert second.built.turns_dropped == {"empty_answer": 1, "not_reached": 1}
    assert not second.built.reason


def test_a_tool_message_ends_the_conversation_before_it(begin: Callable[..., Dialogue]) -> None:
    dialogue = begin(
        ("user", "hi"), ("assistant", "call"), ("tool", "42"), ("assistant", "-"), ("user", "so?")
    )
    dialogue.answer([*b"ok", END], True)
    assert dialogue.prompt is None
    assert supervised(dialogue) == [[[*b"ok", END]]]
    assert dialogue.built.noted["ended_at_tool_message"] == 1


def test_a_prompt_without_room_for_an_answer_is_too_long(begin: Callable[..., Dialogue]) -> None:
    none = begin(("user", "hi"), max_len=len(FIRST))
    assert (none.prompt, none.built.reason) == (None, "too_long")
    later = begin(("user", "hi"), ("assistant", "-"), ("user", "x" * 80), max_len=80)
    later.answer([*b"yes", END], True)
    assert later.prompt is None
    assert later.built.turns_dropped == {"too_long": 1}
    assert len(later.built.rows) == 1


@pytest.mark.parametrize(
    ("turns", "first"),
    [
        ([("user", "hi")], FIRST),
        ([("assistant", "welcome"), ("user", "hi"), ("assistant", "-")], FIRST),
        ([("system", "s"), ("user", "hi")], [*ids("<|turn|>system\ns<|end|>\n"), *FIRST]),
        ([("user", "hi"), ("tool", "42")], FIRST),
    ],
)
def test_a_user_turn_is_answered_wherever_it_stands(
    begin: Callable[..., Dialogue], turns: Any, first: Any
) -> None:
    dialogue = begin(*turns)
    assert asked(dialogue) == first
    dialogue.answer([*b"yes", END], True)
    assert dialogue.prompt is None
    assert supervised(dialogue) == [[[*b"yes", END]]]


@pytest.mark.parametrize("turns", [[("assistant", "hi")], [("system", "s")], [("tool", "1"), ("user", "hi")]])
def test_a_conversation_without_a_user_turn_has_no_row(begin: Callable[..., Dialogue], turns: Any) -> None:
    dialogue = begin(*turns)
    assert (dialogue.prompt, dialogue.built.rows, dialogue.built.reason) == (None, [], "no_user_turn")


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no') }}", "template_error"),
        ("{{ range(99999) | random }}", "template_not_deterministic"),
        ("", "empty_prompt"),
    ],
)
def test_a_prompt_that_cannot_be_rendered_is_counted_by_its_reason(
    begin: Callable[..., Dialogue], template: str, reason: str
) -> None:
    dialogue = begin(("user", "hi"), template=template or "{{ '' }}")
    assert (dialogue.prompt, dialogue.built.reason) == (None, reason)


def test_what_is_said_after_the_last_user_turn_is_counted(begin: Callable[..., Dialogue]) -> None:
    dialogue = begin(("user", "hi"), ("assistant", "-"), ("system", "late"))
    dialogue.answer([*b"yes", END], True)
    assert dialogue.built.repaired == {"answers_replaced": 1, "trailing_turns_cut": 1}
    assert "trailing_turns_cut" not in begin(("system", "s"), ("user", "hi"), ("user", "you")).built.repaired
