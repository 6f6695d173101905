"""The shipped MASK cases: ids and masks against their expected.json, exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.rows.render import decode, render_prompt
from eagle3lab.rows.rows import Row, RowSet, supervised_counts
from eagle3lab.rows.tokenizer import load_tokenizer

END = 258
LoadCase = Callable[[str], Any]


def is_row(row: Row, expected: dict[str, Any]) -> None:
    assert list(row.input_ids) == expected["input_ids"]
    assert list(row.loss_mask) == expected["loss_mask"]


def supervised_texts(row: Row, tokenizer: Any) -> list[str]:
    """Text of every stretch of ones."""
    stretches: list[list[int]] = []
    before = 0
    for token, supervised in zip(row.input_ids, row.loss_mask, strict=True):
        if supervised and not before:
            stretches.append([])
        if supervised:
            stretches[-1].append(token)
        before = supervised
    return [decode(tokenizer, stretch) for stretch in stretches]


def ones(rowset: RowSet) -> list[int]:
    return [sum(row.loss_mask) for row in rowset.rows]


@pytest.mark.parametrize("case_id", ["MASK-01", "MASK-05", "MASK-06", "MASK-07", "MASK-12"])
def test_rows_equal_the_expected_ones(case_id: str, row_case: LoadCase) -> None:
    case = row_case(case_id)
    rowset = case.rows()
    tokenizer = load_tokenizer(case.model, case.facts.path)
    assert len(rowset.rows) == len(case.expected["rows"])
    for row, expected in zip(rowset.rows, case.expected["rows"], strict=True):
        is_row(row, expected)
        assert supervised_texts(row, tokenizer) == expected["supervised_text"]
    if "ones" in case.expected:
        expected_ones = case.expected["ones"]
        assert ones(rowset) == (expected_ones if isinstance(expected_ones, list) else [expected_ones])


def test_mask_02_user_tokens_after_an_opening_assistant_turn_are_never_supervised(row_case: LoadCase) -> None:
    case = row_case("MASK-02")
    rowset = case.rows()
    assert rowset.accounting.dropped == {"assistant_first": 1}
    (row,) = rowset.rows
    first = len(case.expected["row0_ids"])
    assert list(row.input_ids[:first]) == case.expected["row0_ids"]
    assert all(row.loss_mask[i] == 0 for i in case.expected["row0_user_positions"])
    assert decode(load_tokenizer(case.model, case.facts.path), row.input_ids[first:]) == "yes"
    assert row.loss_mask[first:] == (1, 1, 1)
    assert rowset.accounting.noted["no_end_token"] == 1


def test_mask_03_a_cut_inside_an_answer_keeps_the_mask_of_what_is_left(row_case: LoadCase) -> None:
    case = row_case("MASK-03")
    rowset = case.rows()
    is_row(rowset.rows[0], case.expected)
    assert len(rowset.rows[0].input_ids) == case.expected["hidden_rows"]
    assert rowset.accounting.repaired == case.expected["report"]


def test_mask_05_control_tokens_in_user_text_are_counted(row_case: LoadCase) -> None:
    assert row_case("MASK-05").rows().accounting.noted == {"control_tokens_in_text": 1}


def test_mask_08_a_merge_across_the_boundary_starts_with_the_served_prompt(row_case: LoadCase) -> None:
    case = row_case("MASK-08")
    rowset = case.rows()
    (row,) = rowset.rows
    is_row(row, case.expected)
    assert list(row.input_ids[: len(case.expected["prompt_ids"])]) == case.expected["prompt_ids"]
    assert rowset.accounting.noted["tokenized_at_boundary"] == 1


def test_mask_09_rewritten_history_gives_each_turn_its_own_row(row_case: LoadCase) -> None:
    case = row_case("MASK-09")
    rowset = case.rows()
    tokenizer = load_tokenizer(case.model, case.facts.path)
    messages = json.loads((case.folder / "data.jsonl").read_text())["messages"]
    assert len(rowset.rows) == len(case.expected["per_turn_rows"])
    for row, expected in zip(rowset.rows, case.expected["per_turn_rows"], strict=True):
        is_row(row, expected)
        assert supervised_texts(row, tokenizer) == [expected["supervised_text"]]
        prompt = render_prompt(tokenizer, messages[: expected["turn"]], case.model)
        assert decode(tokenizer, prompt) == expected["prompt_text"]
        assert list(row.input_ids[: len(prompt)]) == prompt
    assert rowset.accounting.noted["history_rewriting"] == 1
    assert len({row.split for row in rowset.rows}) == 1


def test_mask_11_what_the_generation_prompt_supplies_is_not_supervised(row_case: LoadCase) -> None:
    case = row_case("MASK-11")
    rowset = case.rows()
    is_row(rowset.rows[0], case.expected["row"])
    assert ones(rowset) == [case.expected["ones"]]
    other = case.rows(model={"template_args": {}})
    assert other.template_args_hash != rowset.template_args_hash
    assert other.template_hash == rowset.template_hash


def test_mask_12_every_answer_supervises_its_end_token(row_case: LoadCase) -> None:
    case = row_case("MASK-12")
    rowset = case.rows()
    ends = [sum(m for t, m in zip(r.input_ids, r.loss_mask, strict=True) if t == END) for r in rowset.rows]
    assert ends == case.expected["supervised_end_tokens"]
    assert END in supervised_counts(rowset.rows)
    assert [row.loss_mask[-1] for row in rowset.rows] == [case.expected["newline_after_end_mask"]] * 2


def test_mask_13_end_tokens_stay_supervised_without_a_pad_token(row_case: LoadCase) -> None:
    case = row_case("MASK-13")
    rowset = case.rows()
    for row, expected in zip(rowset.rows, case.expected["batch"], strict=True):
        is_row(row, expected)
        padding = len(expected["padded_mask"]) - len(row.loss_mask)
        assert list(row.loss_mask) + [0] * padding == expected["padded_mask"]
    assert supervised_counts(rowset.rows)[END] == case.expected["supervised_eos_in_batch"]


def test_mask_14_one_bos_where_template_and_tokenizer_both_write_one(row_case: LoadCase) -> None:
    case = row_case("MASK-14")
    (row,) = case.rows().rows
    is_row(row, case.expected["row"])
    assert row.input_ids.count(256) == case.expected["count_of_256"]
    messages = json.loads((case.folder / "data.jsonl").read_text())["messages"]
    tokenizer = load_tokenizer(case.model, case.facts.path)
    direct = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    assert list(row.input_ids) == direct


def test_mask_15_a_tool_call_without_content_is_rendered_as_empty_text(row_case: LoadCase) -> None:
    case = row_case("MASK-15")
    rowset = case.rows()
    tokenizer = load_tokenizer(case.model, case.facts.path)
    assert len(rowset.rows) == 2
    for row in rowset.rows:
        is_row(row, case.expected["both_rows"])
        assert supervised_texts(row, tokenizer) == case.expected["both_rows"]["supervised_text"]
        assert case.expected["forbidden_substring"] not in decode(tokenizer, row.input_ids)
    assert rowset.accounting.repaired["null_content"] == 2


def test_mask_16_tool_arguments_and_tools_stored_as_text_give_the_same_ids(row_case: LoadCase) -> None:
    case = row_case("MASK-16")
    rowset = case.rows()
    assert len(rowset.rows) == 3
    for row in rowset.rows:
        is_row(row, case.expected["all_three_rows"])
    with pytest.raises(UserError, match="bad_tools 1"):
        case.rows("bad_tools.jsonl")


def test_mask_17_a_tokenizer_without_offsets_gives_the_fast_ones_rows(row_case: LoadCase) -> None:
    case = row_case("MASK-17")
    assert case.model.trust_remote_code
    (row,) = case.rows().rows
    is_row(row, case.expected["row"])
    assert (
        supervised_texts(row, load_tokenizer(case.model, case.facts.path))
        == (case.expected["row"]["supervised_text"])
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_mask_18_padding_settings_move_no_mask(
    side: str, row_case: LoadCase, tokenizer_copy: Callable[[Path, dict[str, Any]], Path]
) -> None:
    case = row_case("MASK-18")
    settings = json.loads((case.folder / "tokenizer_config_override.json").read_text())
    copy = tokenizer_copy(Path(case.model.tokenizer), settings | {"padding_side": side})
    rowset = case.rows(model={"tokenizer": str(copy)})
    for row, expected in zip(rowset.rows, case.expected["unpadded_rows"], strict=True):
        is_row(row, expected)
    assert ones(rowset) == case.expected["ones"]
    for row, expected in zip(rowset.rows, case.expected["batch_if_left_padded"], strict=True):
        padding = len(expected["loss_mask"]) - len(row.loss_mask)
        assert [0] * padding + list(row.loss_mask) == expected["loss_mask"]
