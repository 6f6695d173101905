from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import (
    DataConfig,
    ExtractorConfig,
    HardwareConfig,
    LastState,
    ModelConfig,
    StoreDtype,
)
from eagle3lab.engines.base import States
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract.batches import padding_share, plan_batches
from eagle3lab.extract.pipeline import extract_store
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.store.reader import StoreReader

SHARED = Path(__file__).parent.parent / "cases" / "_shared"
WORDS = ["what is", "a longer question about", "why", "tell me all about the", "count up to"]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "conversations.jsonl"
    records = [
        {
            "id": f"c{i}",
            "messages": [
                {"role": "user", "content": f"{WORDS[i % 5]} {i}"},
                {"role": "assistant", "content": "word " * (i % 7) + str(i)},
            ],
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def extract(store, data, *, said=None, target="target_tiny", **options):
    return extract_store(
        model=ModelConfig(
            name=target, path=str(SHARED / target), tokenizer=str(SHARED / "tok_bytes"),
            template=str(SHARED / "templates" / "plain.jinja"),
        ),
        data=DataConfig(name="test", paths=[str(data)], validation_share=0.2),
        extract=ExtractorConfig(**{"shard_tokens": 150, "batch_tokens": 160, **options}),
        hardware=HardwareConfig(name="cpu"),
        store=store,
        console=Console(file=said or io.StringIO()),
    )  # fmt: skip


def tree(store):
    files = [p for p in sorted(store.rglob("*")) if p.is_file() and "logs" not in p.parts]
    return {str(p.relative_to(store)): p.read_bytes() for p in files}


def test_a_store_is_written_tested_and_logged(conversations, tmp_path):
    said = io.StringIO()
    report = extract(tmp_path / "store", conversations, said=said)
    reader = StoreReader(tmp_path / "store", verify="full")
    assert report.num_captured_rows == report.num_rows == len(reader) == 12
    assert report.num_tokens == sum(row.length for row in reader.rows)
    assert reader.manifest.dtype == "bfloat16"
    assert reader.manifest.layer_ids == (2, 4, 5)
    assert reader.manifest.engine["name"] == "hf"
    text = said.getvalue()
    assert "12 read = 12 kept + 0 dropped" in text
    assert "[[0<|end|>]]" in text  # a sample of what is supervised
    assert "alignment self-test passed: 2 rows" in text
    log = json.loads((tmp_path / "store" / "logs" / "extract.json").read_text())
    assert log["runs"][0]["num_captured_tokens"] == report.num_tokens
    assert {"rows", "load", "self_test", "capture", "write"} <= set(log["runs"][0]["seconds"])
    assert "tok/s" in report.describe()


def test_states_equal_a_forward_of_the_row_alone(conversations, tmp_path):
    from transformers import AutoModelForCausalLM

    extract(tmp_path / "store", conversations, dtype=StoreDtype.float32)
    reader = StoreReader(tmp_path / "store")
    model = AutoModelForCausalLM.from_pretrained(SHARED / "target_tiny", dtype=torch.float32)
    for i in (0, 5, 11):
        row = reader.read(i)
        with torch.no_grad():
            out = model(row["input_ids"][None], output_hidden_states=True)
        want = torch.cat([out.hidden_states[k][0] for k in (2, 4, 5)], dim=-1)
        torch.testing.assert_close(row["aux_hidden_states"], want, rtol=0, atol=1e-5)
        with torch.no_grad():
            logits = model.lm_head(model.model.norm(row["verifier_last_hidden_states"]))
        torch.testing.assert_close(logits, out.logits[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", StoreDtype)
def test_supervised_last_states_are_those_of_a_store_of_all(conversations, tmp_path, monkeypatch, dtype):
    said = io.StringIO()
    report = extract(tmp_path / "all", conversations, dtype=dtype)
    fewer = extract(tmp_path / "some", conversations, dtype=dtype, last_state=LastState.supervised, said=said)
    whole, some = StoreReader(tmp_path / "all"), StoreReader(tmp_path / "some", verify="full")
    stored = zeros = 0
    for i, record in enumerate(some.rows):
        got, expected = some.read(i), whole.read(i)
        kept = got["verifier_last_hidden_states"].any(dim=-1)
        assert int(kept.sum()) == record.num_last_states
        assert bool(kept[got["loss_mask"].bool()].all())
        expected["verifier_last_hidden_states"][~kept] = 0
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        stored, zeros = stored + int(kept.sum()), zeros + int((~kept).sum())
    assert zeros > 0
    tokens, num_aux = stored + zeros, len(some.manifest.layer_ids)
    assert fewer.num_bytes * (num_aux + 1) * tokens == report.num_bytes * (num_aux * tokens + stored)
    assert f"tokens x {num_aux + stored / tokens:.2f} states x" in said.getvalue()
    monkeypatch.setattr(HuggingFaceEngine, "__init__", None)  # neither is captured again
    extract(tmp_path / "some", conversations, dtype=dtype, last_state=LastState.supervised)
    with pytest.raises(UserError, match=r"another last_state_rows \(extract.last_state\)"):
        extract(tmp_path / "some", conversations, dtype=dtype)


def test_a_complete_store_is_recognised_without_loading_the_model(conversations, tmp_path, monkeypatch):
    extract(tmp_path / "store", conversations)
    before = tree(tmp_path / "store")
    monkeypatch.setattr(
        "eagle3lab.extract.pipeline.reference_forward", lambda *_, **__: pytest.fail("the model was loaded")
    )
    report = extract(tmp_path / "store", conversations, shard_tokens=999)
    assert report.already_complete
    assert "nothing to capture" in report.describe()
    assert tree(tmp_path / "store") == before
    assert len(json.loads((tmp_path / "store" / "logs" / "extract.json").read_text())["runs"]) == 1


@pytest.mark.parametrize("stop_after", [1, 2, 5])
def test_interrupted_and_resumed_gives_the_same_bytes(conversations, tmp_path, monkeypatch, stop_after):
    options = {"last_state": LastState.supervised} if stop_after == 5 else {}
    extract(tmp_path / "whole", conversations, **options)
    capture, calls = HuggingFaceEngine.capture, []

    def interrupted(self, rows, layer_ids):
        calls.append(1)
        if len(calls) > stop_after:
            raise KeyboardInterrupt
        return capture(self, rows, layer_ids)

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceEngine, "capture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extract(tmp_path / "store", conversations, **options)
    said = io.StringIO()
    report = extract(tmp_path / "store", conversations, said=said, **options)
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")
    if stop_after == 5:
        assert 0 < report.num_captured_rows < 12
        assert "going on: " in said.getvalue()


def test_nothing_is_written_when_the_self_test_fails(conversations, tmp_path, monkeypatch):
    capture = HuggingFaceEngine.capture
    monkeypatch.setattr(
        HuggingFaceEngine, "capture", lambda self, rows, ids: capture(self, rows, [k + 1 for k in ids])
    )
    with pytest.raises(IntegrityError, match=r"every aux slot is \+1 layer off") as caught:
        extract(tmp_path / "store", conversations)
    assert "nothing was written" in str(caught.value)
    assert not (tmp_path / "store").exists()


def test_an_engine_that_answers_for_other_tokens_ends_the_run(conversations, tmp_path, monkeypatch):
    capture, calls = HuggingFaceEngine.capture, []

    def stale(self, rows, layer_ids):
        calls.append(1)
        states = capture(self, rows, layer_ids)
        if len(calls) == 3:
            states[0] = States(states[0].token_ids.flip(0), states[0].aux, states[0].last)
        return states

    monkeypatch.setattr(HuggingFaceEngine, "capture", stale)
    with pytest.raises(IntegrityError, match="token"):
        extract(tmp_path / "store", conversations)


def test_another_verifier_is_refused_before_the_model_is_loaded(conversations, tmp_path, monkeypatch):
    extract(tmp_path / "store", conversations)
    monkeypatch.setattr(
        "eagle3lab.extract.pipeline.reference_forward", lambda *_, **__: pytest.fail("the model was loaded")
    )
    with pytest.raises(UserError, match="weight_fingerprint"):
        extract(tmp_path / "store", conversations, target="target_ladder")


def test_no_rows_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text('{"messages": [{"role": "user", "content": "no answer"}]}\n')
    with pytest.raises(UserError, match="no conversation became a row"):
        extract(tmp_path / "store", tmp_path / "empty.jsonl")
    assert not (tmp_path / "store").exists()


def test_batches_hold_every_row_once_within_the_padded_budget():
    lengths = [5, 50, 7, 7, 120, 30, 31, 2]
    batches = plan_batches(lengths, 64)
    assert sorted(i for batch in batches for i in batch) == list(range(8))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(lengths[i] for i in batch) <= 64
    assert batches[0] == [4]  # longer than the budget: alone
    assert 0 <= padding_share(lengths, 64) < 0.3


def test_long_rows_of_unlike_lengths_do_not_share_a_batch():
    lengths = [1000, 990, 500, 480, 20, 10]
    assert plan_batches(lengths, 4096) == [[0, 1], [2, 3], [4, 5]]
    assert padding_share(lengths, 4096) < 0.02


def test_progress_is_one_plain_line_per_interval_in_a_file():
    said = io.StringIO()
    with CaptureProgress(Console(file=said), 1000, interval_seconds=0.0) as progress:
        progress.advance(250)
        progress.advance(250)
    lines = said.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("capture 500/1,000 tokens, ")
    assert lines[1].endswith(" s left")


def test_progress_is_a_bar_on_a_terminal():
    said = io.StringIO()
    with CaptureProgress(Console(file=said, force_terminal=True, width=120), 1000) as progress:
        progress.advance(1000)
    assert "1,000/1,000 tokens" in said.getvalue()


def test_progress_that_has_finished_nothing_yet_is_said_without_a_guess() -> None:
    said = io.StringIO()
    with CaptureProgress(Console(file=said), 10, unit="conversations", interval_seconds=0.0) as progress:
        progress.advance(0)
    assert said.getvalue() == "capture 0/10 conversations, 0 conversations/s, nothing is done yet\n"
