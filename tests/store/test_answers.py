"""`answers.jsonl` by itself: what is written is read back, a full disk costs no line that was there."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.store.answers import (
    ANSWERS_FILE,
    StoredAnswer,
    append_answers,
    begin_answers,
    check_header,
    cut_torn_line,
    read_answers,
    require_answers,
    write_answers,
)
from eagle3lab.store.claim import claimed, remove_leftovers

HEADER = {"sampling": {"temperature": 0.7, "stop_token_ids": [1]}, "sampling_hash": "s", "max_len": 9}


def answer(conversation: str, turn: int = 0, *token_ids: int) -> StoredAnswer:
    return StoredAnswer(conversation, turn, "p" * 8, token_ids or (5, 6, 1), True)


def test_answers_are_read_back_as_they_were_added(tmp_path: Path) -> None:
    begin_answers(tmp_path, HEADER)
    append_answers(tmp_path, [answer("b"), answer("a", 1, 7)])
    append_answers(tmp_path, [answer("a")])
    answers = read_answers(tmp_path)
    assert answers is not None
    assert answers.header == HEADER
    assert answers.by_key == {a.key: a for a in (answer("b"), answer("a", 1, 7), answer("a"))}
    assert not answers.torn


def test_a_torn_line_is_cut_and_the_rest_stays(tmp_path: Path) -> None:
    begin_answers(tmp_path, HEADER)
    append_answers(tmp_path, [answer("a"), answer("b")])
    whole = (tmp_path / ANSWERS_FILE).read_bytes()
    first = whole.index(b"\n", whole.index(b"\n") + 1) + 1  # the header and one answer
    for end in range(first + 1, len(whole)):
        (tmp_path / ANSWERS_FILE).write_bytes(whole[:end])
        answers = read_answers(tmp_path)
        assert answers is not None
        assert answers.torn
        assert list(answers.by_key) == [("a", 0)]
        with pytest.raises(IntegrityError, match="its last line is torn"):
            require_answers(tmp_path)
    cut_torn_line(tmp_path, answers)
    assert (tmp_path / ANSWERS_FILE).read_bytes() == whole[:first]


def test_a_full_disk_leaves_the_answers_that_were_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_answers(tmp_path, HEADER)
    append_answers(tmp_path, [answer("a")])
    before = (tmp_path / ANSWERS_FILE).read_bytes()

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"answers\.jsonl .errno 28"):
            append_answers(tmp_path, [answer("b")])
        with pytest.raises(UserError, match=r"answers\.jsonl .errno 28"):
            write_answers(tmp_path, HEADER, [answer("b")])
    assert (tmp_path / ANSWERS_FILE).read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_the_last_writing_says_whether_it_changed_anything(tmp_path: Path) -> None:
    begin_answers(tmp_path, HEADER)
    append_answers(tmp_path, [answer("b"), answer("a")])
    before = (tmp_path / ANSWERS_FILE).read_bytes()
    assert not write_answers(tmp_path, HEADER, [answer("b"), answer("a")])
    assert write_answers(tmp_path, HEADER, [answer("a"), answer("b")], dry=True)
    assert (tmp_path / ANSWERS_FILE).read_bytes() == before
    assert write_answers(tmp_path, HEADER, [answer("a"), answer("b")])
    assert (tmp_path / ANSWERS_FILE).read_bytes() != before


def test_another_header_is_refused_field_by_field(tmp_path: Path) -> None:
    other = {
        **HEADER,
        "sampling": {"temperature": 0, "stop_token_ids": [1]},
        "sampling_hash": "t",
        "max_len": 8,
    }
    check_header(tmp_path, HEADER, json.loads(json.dumps(HEADER)))
    with pytest.raises(UserError) as caught:
        check_header(tmp_path, HEADER, other)
    named = [problem.what.rpartition(" ")[2] for problem in caught.value.problems]
    assert named == ["max_len", "sampling.temperature"]


def test_a_directory_with_answers_alone_may_be_claimed_and_is_cleaned(tmp_path: Path) -> None:
    begin_answers(tmp_path, HEADER)
    (tmp_path / "logs").mkdir()
    (tmp_path / f"{ANSWERS_FILE}.tmp").write_text("half")
    with claimed(tmp_path):
        assert remove_leftovers(tmp_path) == [f"removed {ANSWERS_FILE}.tmp, left by an interrupted run"]
    (tmp_path / ANSWERS_FILE).unlink()
    with pytest.raises(UserError, match="neither a store nor an empty directory"), claimed(tmp_path):
        pass


@pytest.mark.parametrize(
    "line",
    [
        "null", "[]", "{}", '{"conversation":"a"}',
        answer("a").to_line().replace("[5,6,1]", "[]"),
        answer("a").to_line().replace("[5,6,1]", "[5.5]"),
        answer("a").to_line().replace("[5,6,1]", "[true]"),
        answer("a").to_line().replace('"ended":true', '"ended":1'),
        answer("a").to_line().replace('"ended":true', '"ended":true,"more":1'),
    ],
)  # fmt: skip
def test_a_damaged_line_is_named(tmp_path: Path, line: str) -> None:
    begin_answers(tmp_path, HEADER)
    append_answers(tmp_path, [answer("b")])
    with open(tmp_path / ANSWERS_FILE, "a") as file:
        file.write(line.rstrip("\n") + "\n")
    with pytest.raises(IntegrityError, match="line 3 is damaged"):
        read_answers(tmp_path)


def test_a_store_without_answers_says_so(tmp_path: Path) -> None:
    assert read_answers(tmp_path) is None
    with pytest.raises(UserError, match=r"holds no answers.*\n.*data\.regenerate=true"):
        require_answers(tmp_path)
