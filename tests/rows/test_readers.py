from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DataConfig
from eagle3lab.rows.readers import read_conversations


def ids(data: DataConfig) -> list[str]:
    return [conversation.record_id for conversation in read_conversations(data)[0]]


@pytest.fixture
def two_files(write_jsonl: Callable[..., str], chat: Callable[..., dict[str, Any]]) -> list[str]:
    return [
        write_jsonl(*(chat(f"{n}{i}", "x", id=f"{n}{i}") for i in range(count)), name=f"{n}.jsonl")
        for n, count in (("a", 5), ("b", 2))
    ]


def test_files_take_turns_until_each_is_empty(two_files: list[str]) -> None:
    assert ids(DataConfig(paths=two_files)) == ["a0", "b0", "a1", "b1", "a2", "a3", "a4"]


def test_a_limit_counts_only_what_was_read(two_files: list[str]) -> None:
    _, account = read_conversations(DataConfig(paths=two_files, max_conversations=3))
    assert account.read == 3


def test_a_shuffle_is_a_function_of_the_seed(two_files: list[str]) -> None:
    orders = [ids(DataConfig(paths=two_files, shuffle=True, seed=s)) for s in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_duplicates_are_counted_and_dropped_on_request(
    write_jsonl: Callable[..., str], chat: Callable[..., dict[str, Any]]
) -> None:
    path = write_jsonl(chat("a", "b", id=1), chat("a", "b", id=2), chat("a", "c", id=3))
    kept, account = read_conversations(DataConfig(paths=[path]))
    assert len(kept) == 3
    assert account.noted == {"duplicate": 1}
    kept, account = read_conversations(DataConfig(paths=[path], drop_duplicates=True))
    assert [c.record_id for c in kept] == ["1", "3"]
    assert account.examples == {"duplicate": ["2"]}


def test_malformed_lines_and_unknown_roles_of_all_files_come_in_one_message(
    tmp_path: Path, write_jsonl: Callable[..., str]
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages"\n{}\n[\n')
    roles = write_jsonl({"messages": [{"role": "oracle", "content": "x"}, {"role": "muse", "content": "y"}]})
    with pytest.raises(UserError) as error:
        read_conversations(DataConfig(paths=[str(bad), roles]))
    text = str(error.value)
    assert "bad.jsonl:1" in text
    assert "bad.jsonl:3" in text
    assert "bad.jsonl:2" not in text
    assert "'data.role_map={oracle: ROLE, muse: ROLE}'" in text


def test_a_missing_file_is_a_user_error() -> None:
    with pytest.raises(UserError, match=r"no such file.*gone\.jsonl"):
        read_conversations(DataConfig(paths=["gone.jsonl"]))


@pytest.mark.parametrize(
    ("name", "shown"),
    [("\ud800", "\\ud800"), ("a\x1b[31m\nb", "a\\x1b[31m\\nb"), ("\u00e9 [/b] 1", "\u00e9 [/b] 1"), (7, "7")],
)
@pytest.mark.parametrize("key", ["messages", "nothing"])
def test_an_id_is_shown_as_text_that_any_file_takes(
    name: Any, shown: str, key: str, write_jsonl: Callable[..., str], chat: Callable[..., dict[str, Any]]
) -> None:
    record = {"id": name, key: chat("a", "b")["messages"]}
    conversations, account = read_conversations(DataConfig(paths=[write_jsonl(record)]))
    assert [*(c.record_id for c in conversations), *account.examples.get("no_messages", [])] == [shown]
