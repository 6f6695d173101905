"""Evaluation prompts: JSONL of {"id", "category", "turns"} or {"messages"}, as the verifier gets them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.config.schema import PromptsConfig
from eagle3lab.verifier.locate import asset_path

ASSET = "asset:"


@dataclass(frozen=True)
class Prompt:
    """What is asked first: messages up to and including the first user turn."""

    prompt_id: str
    category: str
    messages: tuple[dict[str, Any], ...]
    num_turns_left_out: int  # later user turns need the verifier's own answers and are not decoded


def read_prompts(prompts: PromptsConfig) -> list[Prompt]:
    """The first `max_prompts` prompts of the file, in its order.

    Raises:
        UserError: no file, no prompt, or every malformed line with its number.
    """
    if prompts.path is None:
        raise UserError(
            Problem("no prompts are named", None, "a JSONL file", "prompts.path=FILE or prompts=demo")
        )
    path = (
        asset_path(prompts.path.removeprefix(ASSET)) if prompts.path.startswith(ASSET) else Path(prompts.path)
    )
    if not path.is_file():
        raise UserError(Problem("no such prompt file", prompts.path, "a JSONL file", "prompts.path=FILE"))
    found: list[Prompt] = []
    problems: list[Problem] = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        if len(found) == prompts.max_prompts:
            break
        try:
            found.append(_parse(json.loads(line), f"{path.name}:{number}", prompts.name))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problems.append(
                Problem(
                    f"{path.name}:{number} is not a prompt",
                    f"{type(error).__name__}: {error}",
                    '{"id", "category", "turns": ["..."]} or {"messages": [{"role", "content"}]}',
                )
            )
    raise_all(problems)
    if not found:
        raise UserError(Problem("the prompt file holds no prompt", str(path), "one JSON object per line"))
    return found


def _parse(record: dict[str, Any], source: str, set_name: str) -> Prompt:
    if "turns" in record:
        messages = [{"role": "user", "content": turn} for turn in record["turns"]]
    else:
        messages = [{"role": m["role"], "content": m["content"]} for m in record["messages"]]
    if not all(isinstance(m["content"], str) and m["content"] for m in messages):
        raise ValueError("a turn without text")
    users = [i for i, m in enumerate(messages) if m["role"] == "user"]
    if not users:
        raise ValueError("no user turn")
    return Prompt(
        prompt_id=str(record.get("id", source)),
        category=str(record.get("category") or set_name),
        messages=tuple(messages[: users[0] + 1]),
        num_turns_left_out=len(users) - 1,
    )
