"""The shipped DATA cases: what is read, dropped, counted, split and identified."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import TooLong
from eagle3lab.rows.readers import read_conversations
from eagle3lab.rows.rows import RowSet

LoadCase = Callable[[str], Any]


def record_ids(rowset: RowSet, case: Any) -> list[str]:
    conversations, _ = read_conversations(case.data)
    names = {c.source: c.record_id for c in conversations}
    return [names[row.source] for row in rowset.rows]


def test_data_01_only_a_newline_separates_records(row_case: LoadCase) -> None:
    case = row_case("DATA-01")
    whole = [case.rows(name) for name in ("data.jsonl", "data_crlf_bom.jsonl")]
    assert [len(rowset.rows) for rowset in whole] == [
        case.expected["data.jsonl"]["rows"],
        case.expected["data_crlf_bom.jsonl"]["rows"],
    ]
    assert [row.input_ids for row in whole[0].rows] == [row.input_ids for row in whole[1].rows]


def test_data_01_a_cut_last_line_is_named_or_counted(row_case: LoadCase) -> None:
    case = row_case("DATA-01")
    with pytest.raises(UserError, match=r"data_cut\.jsonl:3 is not JSON"):
        case.rows("data_cut.jsonl")
    skipped = case.rows("data_cut.jsonl", skip_malformed=True)
    assert len(skipped.rows) == 2
    assert skipped.accounting.dropped == {"malformed": 1}
    assert skipped.accounting.read == 3


def test_data_02_unknown_roles_are_listed_together(row_case: LoadCase) -> None:
    case = row_case("DATA-02")
    with pytest.raises(UserError) as error:
        case.rows()
    roles = case.expected["either"].removeprefix("error that lists roles ").split(", ")
    assert len(roles) == 4
    assert all(role in str(error.value) for role in roles)


def test_data_02_a_role_map_covers_them_and_leaves_the_others_alone(row_case: LoadCase) -> None:
    case = row_case("DATA-02")
    case.data.role_map = {
        "solver-9b": "assistant",
        "function_call": "assistant",
        "observation": "tool",
        "developer": "system",
    }
    rowset = case.rows()
    assert record_ids(rowset, case) == ["model-name-role", "ok", "tools", "developer"]
    ok = next(row for row in rowset.rows if row.source.endswith(":2"))
    assert bytes(t for t in ok.input_ids if t < 256) == b"user\na\nassistant\nb\n"
    tools = next(row for row in rowset.rows if row.source.endswith(":3"))
    assert sum(tools.loss_mask) == len("{}") + 1 + len("b") + 1


def test_data_03_a_conversation_the_template_refuses_is_counted_by_id(row_case: LoadCase) -> None:
    case = row_case("DATA-03")
    rowset = case.rows()
    assert record_ids(rowset, case) == case.expected["written"]
    assert rowset.accounting.examples == case.expected["rejected"]
    assert "turns must go" in rowset.accounting.details["template_error"]


def test_data_03_strict_ends_at_the_first_one_naming_it(row_case: LoadCase) -> None:
    with pytest.raises(UserError, match="starts-with-assistant: template_error"):
        row_case("DATA-03").rows(strict=True)


def test_data_04_every_conversation_without_an_answer_has_a_reason(row_case: LoadCase) -> None:
    case = row_case("DATA-04")
    rowset = case.rows()
    account = rowset.accounting
    # documented choice: a text without content is dropped; reasoning that the template leaves out is noted
    assert record_ids(rowset, case) == [*case.expected["must_keep"], "reasoning-only"]
    assert account.noted == {"answer_not_rendered": 1, "duplicate": 1}  # "empty" and "null" are alike
    assert account.read == case.expected["report_total"]
    assert account.kept + sum(account.dropped.values()) == case.expected["kept_plus_dropped"]
    reasons = {name: reason for reason, names in account.examples.items() for name in names}
    assert {name: reasons.get(name) for name in case.expected["must_drop"]} == {
        "system-only": "no_assistant_turn",
        "no-assistant": "no_assistant_turn",
        "no-turns": "no_turns",
        "no-key": "no_messages",
    }
    assert [reasons.get(name) for name in case.expected["documented_choice"]] == ["empty_answer"] * 3 + [None]
    assert all(sum(row.loss_mask) >= 1 for row in rowset.rows)


def test_data_05_mixed_formats_are_read_record_by_record(row_case: LoadCase) -> None:
    case = row_case("DATA-05")
    rowset = case.rows()
    assert len(rowset.rows) == case.expected["rows"]
    assert rowset.accounting.noted["answer_not_rendered"] == 2  # plain.jinja has no tool calls
    for row in rowset.rows[:3]:
        assert list(row.input_ids) == case.expected["rows_1_2_3_same_ids"]
    conversations, _ = read_conversations(case.data)
    assert [sorted(message) for message in conversations[1].messages] == [["content", "role"]] * 2


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
@pytest.mark.parametrize("seed", range(10))
def test_data_06_no_conversation_is_in_both_splits(share: float, seed: int, row_case: LoadCase) -> None:
    case = row_case("DATA-06")
    rowset = case.rows(validation_share=share, seed=seed)
    assert rowset.accounting.noted["duplicate"] == case.expected["duplicates_reported"]
    assert rowset.accounting.noted["prefix_of_longer"] == case.expected["prefix_relation_reported"]
    sides: dict[str, set[str]] = defaultdict(set)
    for row, name in zip(rowset.rows, record_ids(rowset, case), strict=True):
        sides[row.conversation_id].add(row.split)
        sides[name.split("-")[0]].add(row.split)  # c3 and c3-longer, c1 and c1-again
    assert all(len(splits) == 1 for splits in sides.values())


def test_data_06_both_sides_are_used(row_case: LoadCase) -> None:
    case = row_case("DATA-06")
    splits = {row.split for seed in range(3) for row in case.rows(validation_share=0.5, seed=seed).rows}
    assert splits == {"train", "validation"}


def test_data_08_a_limit_takes_from_every_file(row_case: LoadCase) -> None:
    case = row_case("DATA-08")
    chosen = {}
    for seed in case.expected["seeds"]:
        sources = [row.source for row in case.rows(seed=seed).rows]
        assert sources == [row.source for row in case.rows(seed=seed).rows]
        assert len(sources) == 6
        assert {source.split("/")[-1].split(":")[0] for source in sources} == {"a.jsonl", "b.jsonl"}
        chosen[seed] = tuple(sources)
    assert len(set(chosen.values())) == len(chosen)


def test_data_10_template_length_and_arguments_are_part_of_the_identity(row_case: LoadCase) -> None:
    case = row_case("DATA-10")
    runs = yaml.safe_load((case.folder / "runs.yaml").read_text())
    lengths: list[int | None] = []
    identities = set()
    masks = []
    for run in runs:
        model = {
            "template": str(case.folder / run["template"]),
            "template_args": run.get("template_kwargs", {}),
        }
        try:
            rowset = case.rows(model=model, max_len=run["max_length"], too_long=TooLong.drop)
        except UserError as error:
            lengths.append(None)
            refusal = str(error)
            continue
        lengths.append(len(rowset.rows[0].input_ids))
        masks.append(sum(rowset.rows[0].loss_mask))
        identities.add(
            (rowset.template_hash, rowset.template_args_hash, rowset.max_len, rowset.rows[0].row_id)
        )
    assert "too_long" in refusal
    assert lengths == [24, 30, None, 30]
    assert len(identities) == case.expected["distinct_results"] - 1  # the dropped one has no rows
    assert masks[2] < masks[1]
    assert json.dumps(rowset.accounting.as_dict())
