"""One record of any accepted format to one `Conversation`: roles, text contents, tool calls.

Two formats, told apart by their keys: `{"messages": [{"role", "content"}]}` and ShareGPT's
`{"conversations": [{"from", "value"}]}`. Keys that are absent stay absent and null keys are taken
as absent, because templates test whether a key is defined. Tool arguments and tool lists stored as
JSON text become objects, which is what a serving engine hands its template.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from eagle3lab.config.errors import Problem
from eagle3lab.config.schema import DataFormat
from eagle3lab.rows.files import parse_json
from eagle3lab.rows.rows import Conversation, prefix_digests

ROLES = ("system", "user", "assistant", "tool")
ALIASES = {
    **{role: role for role in ROLES},
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
ENGINE_SEPARATOR = "\n"  # between the text parts of a message, where the template takes one text: vLLM's
TURN_KEYS = {"role", "from", "content", "value"}


class Rejected(Exception):
    """Why a record is no usable conversation; counted by `reason`, never shown as an error."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def role_table(role_map: Mapping[str, str]) -> dict[str, str]:
    """The built-in aliases with `data.role_map` over them. A role may also be mapped to itself."""
    return {**ALIASES, **role_map}


def check_role_map(role_map: Mapping[str, str]) -> list[Problem]:
    """Targets that no template knows."""
    return [
        Problem(f"data.role_map.{role}", target, f"one of {', '.join(ROLES)}, or {role} itself")
        for role, target in role_map.items()
        if target not in ROLES and target != role
    ]


def normalise(
    record: Any,
    source: str,
    form: DataFormat,
    roles: Mapping[str, str],
    unknown_roles: Counter[str],
    part_separator: str = ENGINE_SEPARATOR,
) -> tuple[Conversation, Counter[str]]:
    """The conversation and what was repaired in it, by reason. `part_separator`: see `render.part_separator`.

    Raises `Rejected` with the reason of the drop. Roles that `roles` lacks are also counted in
    `unknown_roles`, all of the record's at once, so that one message can name them all.
    """
    if not isinstance(record, dict):
        raise Rejected("bad_record", f"{source}: a JSON {type(record).__name__}, expected an object")
    repaired: Counter[str] = Counter()
    turns = _turns(record, form)
    strangers = [r for turn in turns if (r := _role(turn)) not in roles]
    if strangers:
        unknown_roles.update(strangers)
        raise Rejected("unknown_role", ", ".join(dict.fromkeys(strangers)))
    messages = [_message(turn, roles, part_separator, repaired) for turn in turns]
    given = {"content": record.get("system")}
    system = "" if given["content"] is None else _content(given, part_separator, repaired)
    if system and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": system})
        repaired["system_from_record"] += 1
    elif system and system != messages[0]["content"]:
        repaired["system_of_record_left_out"] += 1
    tools = _tools(record.get("tools"), repaired)
    try:
        digests = prefix_digests(messages, tools)
    except UnicodeEncodeError as error:
        raise Rejected("bad_unicode", f"{source}: {error.reason}") from error
    return Conversation(digests[-1], tuple(messages), tools, source, record_name(record, source)), repaired


def record_name(record: Any, source: str) -> str:
    """The record's own id, else `source`; what a terminal or a file would not take as text is escaped."""
    name = record.get("id") if isinstance(record, dict) else None
    text = source if name is None else str(name)
    return text if name is None or text.isprintable() else repr(text)[1:-1]


def _turns(record: Mapping[str, Any], form: DataFormat) -> list[Any]:
    keys = {DataFormat.messages: ("messages",), DataFormat.sharegpt: ("conversations",)}
    empty = ""
    for key in keys.get(form, ("messages", "conversations")):
        turns = record.get(key)
        if turns is None:
            continue
        if not isinstance(turns, list):
            raise Rejected("bad_message", f"{key} is a JSON {type(turns).__name__}, expected a list")
        if turns:
            return turns
        empty = empty or key
    if empty:
        raise Rejected("no_turns", f"{empty} is empty")
    raise Rejected("no_messages", f"keys {sorted(record)}")


def _either(turn: Mapping[str, Any], key: str, other: str) -> Any:
    """The first of two keys that is not null: table formats fill absent keys with nulls."""
    value = turn.get(key)
    return turn.get(other) if value is None else value


def _role(turn: Any) -> str:
    role = _either(turn, "role", "from") if isinstance(turn, dict) else None
    if not isinstance(role, str):
        raise Rejected("bad_message", "a turn without a role")
    return role


def _message(
    turn: dict[str, Any], roles: Mapping[str, str], part_separator: str, repaired: Counter[str]
) -> dict[str, Any]:
    content = _content(turn, part_separator, repaired)
    message: dict[str, Any] = {"role": roles[_role(turn)], "content": content}
    for key, value in turn.items():
        if key == "tool_calls" and value not in (None, []):  # an engine leaves an empty list out
            message[key] = _tool_calls(value, repaired)
        elif key not in (*TURN_KEYS, "tool_calls") and value is not None:
            message[key] = value
    return message


def _content(turn: Mapping[str, Any], part_separator: str, repaired: Counter[str]) -> str:
    content = _either(turn, "content", "value")
    if content is None:
        repaired["null_content"] += 1
        return ""
    if isinstance(content, list):
        parts = [_text_of(part) for part in content]
        texts = [part for part in parts if isinstance(part, str)]
        if len(texts) < len(parts):
            raise Rejected("not_text", "a content part that is not text")
        repaired["content_parts_joined"] += 1
        return part_separator.join(text for text in texts if text)
    if not isinstance(content, str):
        raise Rejected("bad_message", f"content is a JSON {type(content).__name__}")
    return content


def _text_of(part: Any) -> Any:
    """The text of one content part, if that is what it is: a picture's caption and a thought are none."""
    if not isinstance(part, dict):
        return part
    return part.get("text") if part.get("type") in (None, "text", "input_text", "output_text") else None


def _tool_calls(calls: Any, repaired: Counter[str]) -> list[dict[str, Any]]:
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise Rejected("bad_tool_call", "tool_calls is not a list of objects")
    return [_tool_call(call, repaired) for call in calls]


def _tool_call(call: dict[str, Any], repaired: Counter[str]) -> dict[str, Any]:
    if isinstance(call.get("function"), dict):
        return {**call, "function": _tool_call(call["function"], repaired)}
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = parse_json(arguments) if arguments.strip() else {}
        except ValueError as error:
            raise Rejected("bad_tool_call", f"arguments: {error}") from error
        repaired["arguments_decoded"] += 1
    if "arguments" not in call:
        return call
    if arguments is None:  # as an engine does
        arguments = {}
    if not isinstance(arguments, dict):
        raise Rejected("bad_tool_call", f"arguments are a JSON {type(arguments).__name__}")
    return {**call, "arguments": arguments}


def _tools(tools: Any, repaired: Counter[str]) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools)
        except ValueError as error:
            raise Rejected("bad_tools", str(error)) from error
        repaired["tools_decoded"] += 1
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise Rejected("bad_tools", "tools is not a list of objects")
    return tools
