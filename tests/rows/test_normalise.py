from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from eagle3lab.config.schema import DataFormat
from eagle3lab.rows.normalise import Rejected, check_role_map, normalise, role_table
from eagle3lab.rows.rows import Conversation


def read(record: Any, form: DataFormat = DataFormat.auto) -> tuple[Conversation, Counter[str]]:
    return normalise(record, "f:1", form, role_table({}), Counter())


def reason(record: Any, form: DataFormat = DataFormat.auto) -> str:
    with pytest.raises(Rejected) as rejected:
        read(record, form)
    return rejected.value.reason


def turn(content: Any, **keys: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "content": content, **keys}]}


SHAREGPT = {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
MESSAGES = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}


def test_both_formats_give_the_same_conversation() -> None:
    assert read(SHAREGPT)[0] == read(MESSAGES)[0]


def test_keys_filled_with_nulls_by_a_table_format_are_absent() -> None:
    filled = {
        "conversations": None,
        "messages": [{**m, "from": None, "value": None, "tool_calls": None} for m in MESSAGES["messages"]],
        "tools": None,
    }
    assert read(filled)[0] == read(MESSAGES)[0]
    assert read({**SHAREGPT, "messages": []})[0] == read(SHAREGPT)[0]
    mixed = {"messages": [{"role": None, "content": None, "from": "human", "value": "a"}]}
    assert read(mixed)[0].messages == ({"role": "user", "content": "a"},)


def test_other_keys_of_a_message_reach_the_template() -> None:
    conversation, _ = read(turn("x", reasoning_content="r", name="n"))
    assert conversation.messages[0] == {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "r",
        "name": "n",
    }


def test_text_parts_are_joined_and_counted() -> None:
    conversation, repaired = read(turn([{"type": "text", "text": "a"}, "", "b"]))
    assert conversation.messages[0]["content"] == "a\nb"  # as vLLM joins them, and it leaves empty ones out
    assert repaired == {"content_parts_joined": 1}


def test_a_system_text_beside_the_turns_becomes_the_first_message() -> None:
    conversation, repaired = read({**SHAREGPT, "system": "s"})
    assert conversation.messages[0] == {"role": "system", "content": "s"}
    assert repaired == {"system_from_record": 1}


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ([1], "bad_record"),
        ({"text": "x"}, "no_messages"),
        ({"messages": []}, "no_turns"),
        ({"messages": "x"}, "bad_message"),
        ({"messages": ["x"]}, "bad_message"),
        ({"messages": [{"content": "x"}]}, "bad_message"),
        (turn(3), "bad_message"),
        (turn([{"type": "image_url", "image_url": "u"}]), "not_text"),
        (turn("\ud800"), "bad_unicode"),
        (turn("", tool_calls="x"), "bad_tool_call"),
        (turn("", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "bad_tool_call"),
        (turn("", tool_calls=[{"function": {"name": "f", "arguments": "[1]"}}]), "bad_tool_call"),
        ({**MESSAGES, "tools": "[not json"}, "bad_tools"),
        ({**MESSAGES, "tools": {"a": 1}}, "bad_tools"),
    ],
)
def test_what_cannot_be_used_has_a_reason(record: Any, expected: str) -> None:
    assert reason(record) == expected


def test_a_fixed_format_ignores_the_other_key() -> None:
    assert reason(SHAREGPT, DataFormat.messages) == "no_messages"
    assert reason(MESSAGES, DataFormat.sharegpt) == "no_messages"


def test_the_id_depends_on_content_and_tools_only() -> None:
    first = read({**MESSAGES, "id": "x"})[0]
    assert first.record_id == "x"
    assert first.conversation_id == read({**MESSAGES, "id": "y"})[0].conversation_id
    assert first.conversation_id != read({**MESSAGES, "tools": [{"name": "f"}]})[0].conversation_id


def test_a_role_map_may_not_invent_targets() -> None:
    assert not check_role_map({"model": "assistant", "developer": "developer"})
    assert len(check_role_map({"model": "asistant"})) == 1


def call(arguments: Any) -> dict[str, Any]:
    return turn("", tool_calls=[{"function": {"name": "f", "arguments": arguments}}])


@pytest.mark.parametrize("arguments", [None, "null", "", " ", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(arguments: Any) -> None:
    assert read(call(arguments))[0].messages == read(call({}))[0].messages


def test_an_empty_list_of_calls_is_absent() -> None:
    assert read(turn("x", tool_calls=[]))[0] == read(turn("x"))[0]


@pytest.mark.parametrize(
    "text", ['{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '{"a": ' + "[" * 150 + "]" * 150 + "}", '{"a": NaN}',
             '{"a": 1, "a": 2}'],
)  # fmt: skip
def test_json_in_text_is_read_as_strictly_as_the_file(text: str) -> None:
    assert reason(call(text)) == "bad_tool_call"
    assert reason({**MESSAGES, "tools": f"[{text}]"}) == "bad_tools"


def test_no_system_text_beside_the_turns_is_lost_uncounted() -> None:
    parts = [{"type": "text", "text": "s"}]
    assert read({**SHAREGPT, "system": parts})[0] == read({**SHAREGPT, "system": "s"})[0]
    assert reason({**SHAREGPT, "system": {"text": "s"}}) == "bad_message"
    first = {"role": "system", "content": "s"}
    both = {"messages": [first, *MESSAGES["messages"]]}
    assert read({**both, "system": "s"}) == read(both)
    other, repaired = read({**both, "system": "t"})
    assert other == read(both)[0]
    assert repaired == {"system_of_record_left_out": 1}


@pytest.mark.parametrize("kind", ["image_url", "thinking"])
def test_a_part_that_only_carries_text_is_not_text(kind: str) -> None:
    assert reason(turn([{"type": kind, "text": "caption"}])) == "not_text"
    assert read(turn([{"type": "output_text", "text": "x"}]))[0] == read(turn("x"))[0]
