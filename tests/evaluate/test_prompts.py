from __future__ import annotations

import json

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import PromptsConfig
from eagle3lab.evaluate.prompts import read_prompts


def write(path, *records):
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in records))
    return PromptsConfig(name="set", path=str(path))


def test_the_first_turn_is_taken_and_the_others_are_counted(tmp_path):
    cfg = write(tmp_path / "p.jsonl", {"id": 81, "category": "writing", "turns": ["one", "two"]})
    (prompt,) = read_prompts(cfg)
    assert prompt.messages == ({"role": "user", "content": "one"},)
    assert (prompt.prompt_id, prompt.category, prompt.num_turns_left_out) == ("81", "writing", 1)


def test_messages_keep_their_system_message_and_end_with_the_first_user_turn(tmp_path):
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": "q2"},
    ]
    (prompt,) = read_prompts(write(tmp_path / "p.jsonl", {"messages": messages}))
    assert [m["content"] for m in prompt.messages] == ["be brief", "q"]
    assert (prompt.prompt_id, prompt.category, prompt.num_turns_left_out) == ("p.jsonl:1", "set", 1)


def test_max_prompts_takes_the_first(tmp_path):
    cfg = write(tmp_path / "p.jsonl", *({"id": str(i), "turns": ["x"]} for i in range(5)))
    cfg.max_prompts = 2
    assert [p.prompt_id for p in read_prompts(cfg)] == ["0", "1"]


def test_every_malformed_line_is_named(tmp_path):
    cfg = write(
        tmp_path / "p.jsonl", {"turns": ["ok"]}, "not json", {"id": "x"}, {"turns": []}, {"turns": [3]}
    )
    with pytest.raises(UserError) as caught:
        read_prompts(cfg)
    text = str(caught.value)
    assert "4 problems" in text
    assert all(f"p.jsonl:{n} is not a prompt" in text for n in (2, 3, 4, 5))


@pytest.mark.parametrize(
    ("path", "message"), [(None, "no prompts are named"), ("nowhere.jsonl", "no such prompt file")]
)
def test_a_missing_file_is_a_user_error(path, message):
    with pytest.raises(UserError, match=message):
        read_prompts(PromptsConfig(name="set", path=path))


def test_an_empty_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match="holds no prompt"):
        read_prompts(write(tmp_path / "p.jsonl", ""))
