"""Every MASK case as its own command: what `extract.py` writes, prints and exits with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.errors import EXIT_USER_ERROR
from eagle3lab.config.invocation import Invocation
from eagle3lab.config.schema import TrainRoot
from eagle3lab.data import Eagle3SampleFileDataset, create_collate_fn
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.experiments.lifecycle import begun_run

CASES = Path(__file__).parent
END = 258
Extract = Callable[..., Any]

# where the expected rows of a case stand in its expected.json
EXPECTED_ROWS: dict[str, Callable[[Any], list[dict[str, Any]]]] = {
    "MASK-01": lambda e: e["rows"],
    "MASK-03": lambda e: [e],
    "MASK-05": lambda e: e["rows"],
    "MASK-06": lambda e: e["rows"],
    "MASK-07": lambda e: e["rows"],
    "MASK-08": lambda e: [e],
    "MASK-09": lambda e: e["per_turn_rows"],
    "MASK-11": lambda e: [e["row"]],
    "MASK-12": lambda e: e["rows"],
    "MASK-13": lambda e: e["batch"],
    "MASK-14": lambda e: [e["row"]],
    "MASK-15": lambda e: [e["both_rows"]] * 2,
    "MASK-16": lambda e: [e["all_three_rows"]] * 3,
    "MASK-17": lambda e: [e["row"]],
    "MASK-18": lambda e: e["unpadded_rows"],
}


def expected(case_id: str) -> Any:
    return json.loads((CASES / case_id / "expected.json").read_text())


@pytest.mark.parametrize("case_id", EXPECTED_ROWS)
def test_the_store_holds_the_expected_rows(case_id: str, extract_command: Extract) -> None:
    done = extract_command(case_id)
    want = EXPECTED_ROWS[case_id](expected(case_id))
    assert done.rows() == [(row["input_ids"], row["loss_mask"]) for row in want]
    done.says_every_count()
    texts = [text for row in want for text in _texts(row)]
    assert any(f"[[{text}]]" in done.out for text in texts) or not texts  # for a person to look at


def _texts(row: dict[str, Any]) -> list[str]:
    text = row.get("supervised_text", [])
    return [text] if isinstance(text, str) else list(text)


def test_mask_02_no_token_of_the_user_is_supervised_in_the_store(extract_command: Extract) -> None:
    done = extract_command("MASK-02")
    want = expected("MASK-02")
    ((ids, mask),) = done.rows()
    assert ids[: len(want["row0_ids"])] == want["row0_ids"]
    assert not any(mask[i] for i in want["row0_user_positions"])
    done.says_every_count()


def test_mask_03_a_cut_row_has_a_state_for_every_token_left(extract_command: Extract) -> None:
    done = extract_command("MASK-03")
    row = done.reader.read(0)
    assert {len(tensor) for tensor in row.values()} == {expected("MASK-03")["hidden_rows"]}
    assert done.reader.manifest.accounting["repaired"] == expected("MASK-03")["report"]
    assert "truncated 1" in done.out


def test_mask_11_the_template_arguments_are_kept_and_others_are_refused(extract_command: Extract) -> None:
    done = extract_command("MASK-11")
    assert done.reader.manifest.row_settings["template_args"] == {"enable_thinking": False}
    before = {p: p.read_bytes() for p in done.store.rglob("*") if p.is_file()}
    other = extract_command("MASK-11", "model.template_args={enable_thinking:true}", expect=EXIT_USER_ERROR)
    assert "template_args_hash" in other.err
    assert {p: p.read_bytes() for p in done.store.rglob("*") if p.is_file()} == before
    assert "nothing to capture" in extract_command("MASK-11").out
    arguments = "model.template_args={enable_thinking:true}"
    train = extract_command("MASK-11", arguments, entry="train", expect=EXIT_USER_ERROR)
    assert "model.template_args={enable_thinking: false}" in train.err


def test_mask_11_the_exported_draft_says_the_template_arguments(
    extract_command: Extract, tmp_path: Path
) -> None:
    manifest = extract_command("MASK-11").reader.manifest
    with begun_run(TrainRoot(), Invocation(), tmp_path / "run", manifest) as provenance:
        assert provenance["store"]["template_args"] == {"enable_thinking": False}  # written beside the draft
        assert provenance["store"]["template_hash"] == manifest.template_hash


def test_mask_12_the_end_token_is_in_the_smallest_draft_vocabulary(extract_command: Extract) -> None:
    reader = extract_command("MASK-12", "data.validation_share=0").reader
    counts = reader.token_counts()
    assert int(counts[END]) == sum(expected("MASK-12")["supervised_end_tokens"])
    assert bool(DraftVocabulary.from_counts(counts, 1).t2d[END])  # the most frequent of all
    counts[END] = 0
    assert not bool(DraftVocabulary.from_counts(counts, 1).t2d[END])
    assert bool(DraftVocabulary.from_counts(counts, 1, always_keep=[END]).t2d[END])  # as train.py does


@pytest.mark.parametrize("case_id", ["MASK-13", "MASK-18"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_batches_pad_behind_the_rows_and_leave_every_end_token(
    case_id: str, side: str, extract_command: Extract, tokenizer_copy: Callable[..., Path]
) -> None:
    """Through the data path: the loss mask of a batch is the rows' own, wherever the tokenizer would pad."""
    settings = {"padding_side": side, "pad_token": "<|end|>"}
    copy = tokenizer_copy(CASES / "_shared" / "tok_bytes", settings)
    done = extract_command(case_id, f"model.tokenizer={copy}")
    want = EXPECTED_ROWS[case_id](expected(case_id))
    dataset = Eagle3SampleFileDataset(done.store)
    items = [dataset[i] for i in range(len(dataset))]
    # the sample at position i predicts token i + 1, so it carries that token's mask
    longest = max(dataset.lengths)
    for item, row in zip(items, want, strict=True):
        alone = create_collate_fn(longest)([item])
        padding = longest - len(row["loss_mask"]) + 1
        assert alone["loss_mask"][0].tolist() == row["loss_mask"][1:] + [0] * padding
        assert alone["document_ids"][0].tolist() == [0] * (longest - padding) + [-1] * padding
    batch = create_collate_fn(sum(dataset.lengths) + 5)(items)
    assert batch["loss_mask"][0].tolist() == [m for row in want for m in row["loss_mask"][1:]] + [0] * 5
    ends = (batch["input_ids"] == END) & (batch["loss_mask"] == 1)
    assert int(ends.sum()) == 2


def test_mask_16_malformed_tools_reject_the_row(extract_command: Extract) -> None:
    done = extract_command(
        "MASK-16", f"data.paths=[{CASES / 'MASK-16' / 'bad_tools.jsonl'}]", expect=EXIT_USER_ERROR
    )
    assert "bad_tools 1" in done.err
    assert not done.store.exists()
