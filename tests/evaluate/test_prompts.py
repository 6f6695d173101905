from __future__ import annotations

import json
from itertools import pairwise

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


def test_max_prompts_spreads_over_categories_and_a_smaller_choice_is_part_of_a_larger(tmp_path):
    categories = ["a"] * 4 + ["b"] * 1 + ["c"] * 3
    records = [{"id": str(i), "category": c, "turns": ["x"]} for i, c in enumerate(categories)]
    cfg = write(tmp_path / "p.jsonl", *records)
    chosen = []
    for cfg.max_prompts in range(1, 10):
        chosen.append([p.prompt_id for p in read_prompts(cfg)])
    assert chosen[2] == ["0", "4", "5"]
    assert chosen[4] == ["0", "1", "4", "5", "6"]
    assert chosen[7] == chosen[8] == [str(i) for i in range(8)]
    assert all(set(few) <= set(more) for few, more in pairwise(chosen))


def test_a_character_that_looks_like_the_end_of_a_line_stays_in_the_text(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps({"turns": ["a\u2028b\x85c"]}, ensure_ascii=False), encoding="utf-8")
    assert (
        read_prompts(PromptsConfig(name="set", path=str(file)))[0].messages[0]["content"] == "a\u2028b\x85c"
    )


def test_two_prompts_of_one_id_are_refused(tmp_path):
    cfg = write(tmp_path / "p.jsonl", {"id": "x", "turns": ["a"]}, {"id": "x", "turns": ["b"]})
    with pytest.raises(UserError, match=r"p.jsonl:2 .*'x' is that of line 1"):
        read_prompts(cfg)


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
