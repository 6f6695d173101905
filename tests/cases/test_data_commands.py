"""Every DATA and EXT case as its own command: what `extract.py` writes, prints and exits with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from eagle3lab.config.errors import EXIT_USER_ERROR

CASES = Path(__file__).parent
Extract = Callable[..., Any]


def expected(case_id: str) -> Any:
    return json.loads((CASES / case_id / "expected.json").read_text())


@pytest.mark.parametrize("name", ["data.jsonl", "data_crlf_bom.jsonl"])
def test_data_01_every_record_becomes_a_row(name: str, extract_command: Extract) -> None:
    done = extract_command("DATA-01", f"data.paths=[{CASES / 'DATA-01' / name}]")
    assert len(done.reader) == expected("DATA-01")[name]["rows"]
    done.says_every_count()


def test_data_01_a_cut_file_names_its_line_or_is_counted(extract_command: Extract) -> None:
    file = f"data.paths=[{CASES / 'DATA-01' / 'data_cut.jsonl'}]"
    refused = extract_command("DATA-01", file, expect=EXIT_USER_ERROR)
    assert "data_cut.jsonl:3 is not JSON" in refused.err
    assert not refused.store.exists()
    done = extract_command("DATA-01", file, "data.skip_malformed=true")
    assert len(done.reader) == 2
    assert done.reader.manifest.accounting["dropped"] == {"malformed": 1}
    done.says_every_count()


def test_data_02_unknown_roles_end_the_command_with_all_their_names(extract_command: Extract) -> None:
    done = extract_command("DATA-02", expect=EXIT_USER_ERROR)
    roles = expected("DATA-02")["either"].removeprefix("error that lists roles ").split(", ")
    assert all(role in done.err for role in roles)
    assert "data.role_map=" in done.err
    mapped = extract_command(
        "DATA-02",
        "data.role_map={solver-9b:assistant,function_call:assistant,observation:tool,developer:system}",
    )
    assert len(mapped.reader) == 4
    mapped.says_every_count()


def test_data_03_refused_conversations_are_named_and_the_rest_is_written(extract_command: Extract) -> None:
    done = extract_command("DATA-03", expect=expected("DATA-03")["exit_code"])
    want = expected("DATA-03")
    assert len(done.reader) == len(want["written"])
    assert done.reader.manifest.accounting["examples"] == want["rejected"]
    assert "template_error: starts-with-assistant, two-users" in done.out
    done.says_every_count()


def test_data_03_strict_exits_with_an_error_at_the_first_one(extract_command: Extract) -> None:
    done = extract_command("DATA-03", "data.strict=true", expect=EXIT_USER_ERROR)
    assert "starts-with-assistant: template_error" in done.err
    assert "two-users" not in done.err
    assert not done.store.exists()


def test_data_04_kept_and_dropped_make_what_was_read(extract_command: Extract) -> None:
    done = extract_command("DATA-04")
    account, want = done.reader.manifest.accounting, expected("DATA-04")
    assert account["read"] == want["report_total"]
    assert account["kept"] + sum(account["dropped"].values()) == want["kept_plus_dropped"]
    dropped = {name for names in account["examples"].values() for name in names}
    assert set(want["must_drop"]) <= dropped
    assert not set(want["must_keep"]) & dropped
    assert all(sum(mask) >= 1 for _, mask in done.rows())
    done.says_every_count()


def test_data_05_mixed_formats_in_one_file(extract_command: Extract) -> None:
    done = extract_command("DATA-05")
    rows, want = done.rows(), expected("DATA-05")
    assert len(rows) == want["rows"]
    assert [ids for ids, _ in rows[:3]] == [want["rows_1_2_3_same_ids"]] * 3
    done.says_every_count()


@pytest.mark.parametrize("seed", [0, 1])
def test_data_06_a_conversation_lies_on_one_side_of_the_split(seed: int, extract_command: Extract) -> None:
    done = extract_command("DATA-06", "data.validation_share=0.5", f"data.seed={seed}")
    want = expected("DATA-06")
    sides: dict[str, set[str]] = {}
    for row in done.reader.rows:
        sides.setdefault(row.conversation_id, set()).add(row.split)
    assert all(len(splits) == 1 for splits in sides.values())
    assert done.reader.manifest.accounting["noted"]["duplicate"] == want["duplicates_reported"]
    assert done.reader.manifest.accounting["noted"]["prefix_of_longer"] == want["prefix_relation_reported"]
    done.says_every_count()


def test_data_08_a_limit_takes_from_every_file_by_seed(extract_command: Extract) -> None:
    chosen = set()
    for seed in expected("DATA-08")["seeds"]:
        done = extract_command("DATA-08", f"data.seed={seed}", store=f"store{seed}")
        sources = tuple(row.source for row in done.reader.rows)
        assert len(sources) == 6
        assert {Path(source).name.split(":")[0] for source in sources} == {"a.jsonl", "b.jsonl"}
        chosen.add(sources)
    again = extract_command("DATA-08", "data.seed=0", store="store0")
    assert "nothing to capture" in again.out
    assert len(chosen) == len(expected("DATA-08")["seeds"])


def test_data_10_no_run_takes_over_the_rows_of_another(extract_command: Extract) -> None:
    """All into one place: refused by name; each into a place of its own: four results that say what they are."""
    runs = yaml.safe_load((CASES / "DATA-10" / "runs.yaml").read_text())
    words = [
        (
            f"model.template={CASES / 'DATA-10' / run['template']}",
            f"data.max_len={run['max_length']}",
            *(["model.template_args={enable_thinking:false}"] if "template_kwargs" in run else []),
        )
        for run in runs
    ]
    extract_command("DATA-10", *words[0], store="one")
    for other in words[1:]:
        refused = extract_command("DATA-10", *other, store="one", expect=EXIT_USER_ERROR)
        assert "template_hash" in refused.err or "too_long 1" in refused.err

    settings, lengths, masks = [], [], []
    for number in (0, 1, 3):
        done = extract_command("DATA-10", *words[number], store=f"own{number}")
        ((ids, mask),) = done.rows()
        lengths.append(len(ids))
        masks.append(sum(mask))
        manifest = done.reader.manifest
        assert manifest.row_settings["max_len"] == runs[number]["max_length"]
        assert manifest.row_settings["template_args"] == runs[number].get("template_kwargs", {})
        assert len(manifest.tokenizer_hash) == len(manifest.planned_rows_hash) == 64
        settings.append((manifest.template_hash, manifest.template_args_hash, manifest.planned_rows_hash))
    assert lengths == [24, 30, 30]
    assert masks[2] < masks[1]
    assert len(set(settings)) == 3
    for rule in ("drop", "truncate"):  # the prompt alone has 20 tokens
        short = extract_command(
            "DATA-10", *words[2], f"data.too_long={rule}", store="two", expect=EXIT_USER_ERROR
        )
        assert "too_long 1" in short.err
        assert not short.store.exists()


def test_rendering_in_several_processes_writes_the_same_store(extract_command: Extract) -> None:
    trees = []
    for workers in (0, 2):
        done = extract_command(
            "DATA-06",
            f"extract.num_render_workers={workers}",
            "data.validation_share=0.5",
            store=f"s{workers}",
        )
        files = sorted(p for p in done.store.rglob("*") if p.is_file() and "logs" not in p.parts)
        trees.append({str(p.relative_to(done.store)): p.read_bytes() for p in files})
    assert trees[0] == trees[1]


@pytest.mark.parametrize("case_id", ["EXT-01", "EXT-02"])
def test_states_are_those_of_each_conversation_alone(case_id: str, extract_command: Extract) -> None:
    done = extract_command(case_id, "extract.dtype=float32")
    want = list(load_file(CASES / case_id / "expected_hidden.safetensors").values())
    assert [row.length for row in done.reader.rows] == [len(states) for states in want]
    for i, states in enumerate(want):
        row = done.reader.read(i)
        got = torch.cat([row["aux_hidden_states"], row["verifier_last_hidden_states"]], -1)
        torch.testing.assert_close(got.unflatten(-1, (states.shape[1], -1)), states, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case_id", ["EXT-04", "EXT-05"])
def test_slots_of_the_command_hold_the_layers_they_are_named_after(
    case_id: str, extract_command: Extract
) -> None:
    """EXT-05 names no ids: the defaults of a verifier of eight layers are the same ones."""
    done = extract_command(case_id)
    row, want = done.reader.read(0), expected("EXT-04")
    states = torch.cat([row["aux_hidden_states"], row["verifier_last_hidden_states"]], -1)
    slots = states.unflatten(-1, (len(want["slot_values"]), -1))
    assert [float(slots[:, k].unique()) for k in range(slots.shape[1])] == want["slot_values"]
    manifest = json.loads((done.store / "manifest.json").read_text())
    assert (manifest["layer_ids"], manifest["layer_convention"]) == ([2, 4, 5], "hf_hidden_states")
    assert manifest["last_state"] == "pre_norm"


@pytest.mark.parametrize("key", ["model.aux_layer_ids", "extract.layer_ids"])
def test_ext_07_ids_in_another_order_are_refused_by_name(key: str, extract_command: Extract) -> None:
    done = extract_command("EXT-07", f"{key}=[5,2,4]", expect=EXIT_USER_ERROR)
    assert f"{key}: [5, 2, 4]" in done.err
    assert "increasing" in done.err
    assert not done.store.exists()
    trains = extract_command("EXT-04", "draft.aux_layer_ids=[4,2]", entry="train", expect=EXIT_USER_ERROR)
    assert "draft.aux_layer_ids: [4, 2]" in trains.err


def test_ext_11_conversations_in_another_order_are_not_taken_for_the_stored_ones(
    extract_command: Extract,
) -> None:
    files = [f"data.paths=[{CASES / 'EXT-11' / f'data_v{version}.jsonl'}]" for version in (1, 2)]
    done = extract_command("EXT-11", files[0])
    before = {p: p.read_bytes() for p in done.store.rglob("*") if p.is_file()}
    refused = extract_command("EXT-11", files[1], expect=EXIT_USER_ERROR)
    assert "planned_rows_hash" in refused.err
    assert {p: p.read_bytes() for p in done.store.rglob("*") if p.is_file()} == before


def test_ext_12_the_bytes_that_are_needed_are_printed_before_the_start(extract_command: Extract) -> None:
    done, want = extract_command("EXT-12"), expected("EXT-12")
    num_tokens = 20 * want["tokens_per_sample"]
    assert f"disk: {num_tokens:,} tokens x 4 states x 32 x bfloat16" in done.out
    assert done.out.index("disk: ") < done.out.index("alignment self-test passed")
    assert done.reader.manifest.num_tokens == num_tokens


def test_ext_16_rows_beyond_the_positions_are_dropped_or_cut(extract_command: Extract) -> None:
    want = expected("EXT-16")
    dropped = extract_command("EXT-16", expect=want["exit_code"])
    assert [row.length for row in dropped.reader.rows] == [want["short"]]
    assert "too_long 1" in dropped.out
    dropped.says_every_count()
    cut = extract_command("EXT-16", "data.too_long=truncate", store="cut", expect=want["exit_code"])
    (ids, mask), _ = cut.rows()
    assert len(ids) == len(mask) == want["target_max"]
    assert cut.reader.manifest.accounting["repaired"] == {"truncated": 1}
    assert "truncated 1" in cut.out
    cut.says_every_count()
