"""The shipped conversations: what their notices say about them."""

from __future__ import annotations

import json
import re

import pytest

from eagle3lab.config.schema import DataConfig, ModelConfig
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.readers import read_conversations
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.locate import asset_path

FILES = {"demo": "demo/conversations.jsonl.xz", "tiny_chat": "tiny_chat/conversations.jsonl.xz"}


def words(text: str) -> str:
    return " ".join(re.findall(r"[a-z0-9']+", text.lower()))


def prompts(name: str) -> list[dict[str, object]]:
    lines = asset_path(f"{name}/prompts.jsonl").read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


@pytest.mark.parametrize(("name", "count"), [("demo", 40), ("tiny_chat", 12)])
def test_no_held_out_prompt_is_in_the_conversations(name: str, count: int) -> None:
    conversations, account = read_conversations(DataConfig(paths=[f"asset:{FILES[name]}"]))
    held_out = {words(str(turn)) for prompt in prompts(name) for turn in prompt["turns"]}
    assert len(held_out) == count
    turns = {words(m["content"]) for c in conversations for m in c.messages if m["role"] == "user"}
    assert not held_out & turns
    assert account.read == len(conversations)
    assert not account.noted


@pytest.mark.parametrize("name", FILES)
def test_every_conversation_is_user_and_assistant_in_turn(name: str) -> None:
    conversations, _ = read_conversations(DataConfig(paths=[f"asset:{FILES[name]}"]))
    roles = {tuple(m["role"] for m in c.messages) for c in conversations}
    assert roles == {("user", "assistant"), ("user", "assistant") * 2}


def test_the_demo_file_is_small() -> None:
    assert asset_path(FILES["demo"]).stat().st_size < 3_000_000


def test_tiny_conversations_all_fit_the_tiny_verifier() -> None:
    facts = read_facts(asset_path("tiny"))
    rowset = build_rows(DataConfig(paths=[f"asset:{FILES['tiny_chat']}"]), ModelConfig(name="tiny"), facts)
    notice = (asset_path("tiny_chat") / "NOTICE.md").read_text()
    assert rowset.accounting.read == rowset.accounting.kept == len(rowset.rows) == 300
    assert not rowset.accounting.noted
    assert f"{rowset.num_supervised:,} supervised".replace(",", " ") in notice
    assert {row.split for row in rowset.rows} == {"train", "validation"}


def test_notices_state_licence_and_number() -> None:
    for name, file in FILES.items():
        notice = (asset_path(name) / "NOTICE.md").read_text()
        conversations, _ = read_conversations(DataConfig(paths=[f"asset:{file}"]))
        assert "Apache-2.0" in notice
        assert f"{len(conversations)} conversations" in notice
