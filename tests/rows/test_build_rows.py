from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DataConfig, ModelConfig, TooLong
from eagle3lab.rows.build import CONVERSATIONS_PER_WORKER, MAX_WORKERS, build_rows, worthwhile_workers
from eagle3lab.rows.rows import RowSet
from eagle3lab.rows.sample import describe_sample
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.trained_on import text_key
from eagle3lab.verifier.facts import VerifierFacts

Chat = Callable[..., dict[str, Any]]
RowsOf = Callable[..., RowSet]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
roles = st.sampled_from(["user", "assistant", "system", "tool", "human", "gpt"])
messages = st.lists(
    st.fixed_dictionaries({"role": roles}, optional={"content": json_values, "tool_calls": json_values}),
    max_size=5,
)
records = st.lists(
    st.fixed_dictionaries({"messages": messages}, optional={"tools": json_values, "id": json_values})
    | json_values,
    max_size=6,
)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(records=records, share=st.floats(0, 1), too_long=st.sampled_from(TooLong), max_len=st.integers(2, 60))
def test_everything_read_is_kept_or_dropped_for_a_reason(
    records: list[Any], share: float, too_long: TooLong, max_len: int, rows_of: RowsOf, chat: Chat
) -> None:
    good = chat("a", "b")  # 23 ids, the answer from 20 on
    try:
        rowset = rows_of(
            good,
            *records,
            validation_share=share,
            too_long=too_long,
            max_len=max_len,
        )
    except UserError as error:
        refusal = str(error)
    else:
        refusal = ""
    assert not refusal or (max_len <= 23 and "no conversation became a row" in refusal)
    if refusal:
        return
    account = rowset.accounting
    assert account.read == 1 + len(records) == account.kept + sum(account.dropped.values())
    assert account.rows == len(rowset.rows) >= account.kept
    for row in rowset.rows:
        assert len(row.input_ids) == len(row.loss_mask) <= max_len
        assert set(row.loss_mask) <= {0, 1}
        assert sum(row.loss_mask) >= 1
        assert row.row_id == row_id_of(row.input_ids, row.loss_mask)
        assert row.split in {"train", "validation"}


def test_a_pool_of_processes_gives_the_same_rows(rows_of: RowsOf, chat: Chat) -> None:
    data = [chat(f"question {i}", "answer" * (i % 5), id=i) for i in range(80)]
    assert rows_of(*data, num_workers=2, max_tokens=2000) == rows_of(*data, max_tokens=2000)


def test_few_conversations_are_rendered_without_other_processes() -> None:
    assert worthwhile_workers(3 * CONVERSATIONS_PER_WORKER // 2) == 0
    assert worthwhile_workers(10**6) in (0, *range(2, MAX_WORKERS + 1))


def test_the_cap_is_the_smaller_of_configuration_and_verifier(
    facts: VerifierFacts, shared: Any, rows_of: RowsOf, chat: Chat
) -> None:
    folder = shared.parent / "EXT-16"
    expected = json.loads((folder / "expected.json").read_text())
    data = DataConfig(name="d", paths=[str(folder / "data.jsonl")])
    dropped = build_rows(data, ModelConfig(name="m"), facts)
    assert dropped.max_len == expected["target_max"]
    assert dropped.accounting.examples == {"too_long": ["long"]}
    assert [len(row.input_ids) for row in dropped.rows] == [expected["short"]]
    cut = build_rows(replace(data, too_long=TooLong.truncate), ModelConfig(name="m"), facts)
    assert [len(row.input_ids) for row in cut.rows] == [expected["target_max"], expected["short"]]
    assert cut.accounting.repaired == {"truncated": 1}


def test_a_cut_that_loses_a_whole_turn_counts_it(rows_of: RowsOf, chat: Chat) -> None:
    rowset = rows_of(chat("a", "b", "c", "d"), max_len=30, too_long=TooLong.truncate)
    assert len(rowset.rows[0].input_ids) == 30
    assert rowset.accounting.turns_dropped == {"too_long": 1}
    assert rowset.accounting.repaired == {"truncated": 1}


def test_rows_end_once_they_hold_max_tokens(rows_of: RowsOf, chat: Chat) -> None:
    data = [chat(f"{i}", "b", id=i) for i in range(9)]  # 23 tokens each
    rowset = rows_of(*data, max_tokens=47)
    assert [len(row.input_ids) for row in rowset.rows] == [23, 23, 23]
    assert rowset.accounting.dropped == {"beyond_max_tokens": 6}
    assert rowset.accounting.read == 9


def test_strict_names_the_first_faulty_conversation_only(rows_of: RowsOf, chat: Chat) -> None:
    data = [chat("a", "b", id="fine"), chat("a", "", id="hollow"), chat("a", "b", id="copy")]
    with pytest.raises(UserError, match="hollow: empty_answer"):
        rows_of(*data, strict=True)
    assert rows_of(data[0], data[2], strict=True, drop_duplicates=True).accounting.kept == 1


def test_ids_the_verifier_does_not_know_are_dropped(facts: VerifierFacts, shared: Any, tmp_path: Any) -> None:
    path = tmp_path / "d.jsonl"
    records = [
        {"messages": [{"role": "user", "content": u}, {"role": "assistant", "content": "a"}]}
        for u in ("<|tool|>", "b")
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    small = replace(facts, vocab_size=263)
    rowset = build_rows(DataConfig(name="d", paths=[str(path)]), ModelConfig(name="m"), small)
    assert rowset.accounting.dropped == {"token_outside_vocabulary": 1}


def test_no_row_at_all_is_an_error_with_the_account(rows_of: RowsOf, chat: Chat) -> None:
    with pytest.raises(UserError, match=r"no conversation became a row\n.*1 read = 0 kept \+ 1 dropped"):
        rows_of(chat("only a question"))


def test_a_copy_of_a_conversation_and_its_continuation_share_a_side(rows_of: RowsOf, chat: Chat) -> None:
    data = [c for i in range(40) for c in (chat(f"q{i}", "a"), chat(f"q{i}", "a", "more", "b"))]
    rowset = rows_of(*data, validation_share=0.5)
    sides = [row.split for row in rowset.rows]
    assert sides[0::2] == sides[1::2]
    assert set(sides) == {"train", "validation"}
    assert rowset.accounting.noted["prefix_of_longer"] == 40


@pytest.mark.parametrize(("share", "expected"), [(0.0, {"train"}), (1.0, {"validation"})])
def test_a_share_of_nothing_or_all_leaves_one_side(
    share: float, expected: set[str], rows_of: RowsOf, chat: Chat
) -> None:
    rowset = rows_of(*(chat(f"q{i}", "a") for i in range(20)), validation_share=share)
    assert {row.split for row in rowset.rows} == expected


def test_the_share_is_met_in_expectation_and_adding_data_moves_nothing(rows_of: RowsOf, chat: Chat) -> None:
    few = rows_of(*(chat(f"q{i}", "a") for i in range(500)), validation_share=0.2)
    many = rows_of(*(chat(f"q{i}", "a") for i in range(1000)), validation_share=0.2)
    assert [row.split for row in many.rows[:500]] == [row.split for row in few.rows]
    assert 150 < many.num_rows("validation") < 250


def test_equal_input_gives_an_equal_account_as_json(rows_of: RowsOf, chat: Chat) -> None:
    data = [chat("a", "b", id=1), chat("c", "", id=2), {"id": 3}]
    accounts = [json.dumps(rows_of(*data).accounting.as_dict()) for _ in range(2)]
    assert accounts[0] == accounts[1]


def test_a_sample_marks_what_is_supervised(rows_of: RowsOf, chat: Chat, byte_tokenizer: Any) -> None:
    text = describe_sample(rows_of(chat("u" * 300, "yes", "and", "no"), chat("a", "")), byte_tokenizer)
    assert "[[yes<|end|>]]" in text
    assert "[[no<|end|>]]" in text
    assert "u" * 100 not in text
    assert "empty_answer 1" in text


def test_what_users_say_is_known_of_training_conversations_in_every_turn_and_of_no_others(
    rows_of: RowsOf, chat: Chat
) -> None:
    said = [(f"opening {i}", f"then {i}") for i in range(40)]
    records = [chat(first, "answer", second, "answer") for first, second in said]
    system = {"role": "system", "content": "rules"}
    lonely = {"messages": [system, {"role": "user", "content": "no answer"}]}  # gives no row
    rowset = rows_of(*records, lonely, validation_share=0.3)
    train = {row.source for row in rowset.rows if row.split == "train"}
    assert 0 < len(train) < 40
    lines = {f"opening {i}": f":{i + 1}" for i in range(40)}
    expected = {
        text_key(text)
        for first, second in said
        if any(source.endswith(lines[first]) for source in train)
        for text in (first, second)
    }
    assert rowset.user_turns == expected


@pytest.mark.parametrize("seed", range(5))
def test_rows_that_a_trimming_template_makes_equal_share_a_side(
    seed: int, rows_of: RowsOf, chat: Chat, shared: Any, tmp_path: Any
) -> None:
    template = tmp_path / "trim.jinja"
    text = (shared / "templates" / "plain.jinja").read_text()
    template.write_text(text.replace("m.content", "m.content | trim"))
    data = [chat(space.format("hi"), "a") for space in ("{}", "{} ", "\t{}", "\n{}\r\n")]
    rowset = rows_of(*data, validation_share=0.5, seed=seed, template=str(template))
    assert len(rowset.rows) == 4
    assert len({(row.row_id, row.split) for row in rowset.rows}) == 1


def test_an_end_token_that_only_history_has_is_supervised_there(
    rows_of: RowsOf, chat: Chat, tmp_path: Any
) -> None:
    template = tmp_path / "no_last_end.jinja"
    template.write_text(
        "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}"
        "{% if m.role == 'user' or not loop.last %}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
    )
    rowset = rows_of(chat("a", "b", "c", "d"), template=str(template))
    (row,) = rowset.rows
    supervised = [token for token, one in zip(row.input_ids, row.loss_mask, strict=True) if one]
    assert supervised == [*b"b", 258, *b"d"]
    assert rowset.accounting.noted == {"no_end_token": 2}


HEAD = "{% for m in messages %}{{ '<|turn|>' }}"
TAIL = "{{ '<|end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|turn|>' }}{% endif %}"
WALKS = "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            "{{ m.content }}",
            "a\nb",
        ),  # a list would be written as Python shows it: vLLM joins the parts instead
        ("{{ m.content | trim }}", "a\nb"),
        ("{{ '' + m.content }}", "a\nb"),
        ("{% if m.content is string %}{{ m.content }}{% endif %}", "a\nb"),
        (WALKS, "ab"),  # vLLM hands this one the parts
        (WALKS.replace("{{ p.text }}", "{{ p.text }}{{ '\\n\\n' if not loop.last }}"), "a\n\nb"),
    ],
)
def test_text_parts_stand_in_a_row_as_in_the_served_prompt(
    content: str, expected: str, rows_of: RowsOf, chat: Chat, tmp_path: Path
) -> None:
    template = tmp_path / "parts.jinja"
    template.write_text(HEAD + content + TAIL)
    parts = [{"type": "text", "text": text} for text in ("a", "", "b")]
    (row,) = rows_of(chat(parts, "c"), template=str(template)).rows
    written = "".join(chr(i) if i < 256 else "|" for i in row.input_ids)
    assert written == f"|{expected}||c|"
