"""The self-test at train start: a store on disk against the verifier it names."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract import self_test
from eagle3lab.extract.self_test import self_test_store
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest, VerifierIdentity
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import read_facts, weight_fingerprint

IDS = (2, 3, 4)
GENERATOR = torch.Generator().manual_seed(7)
ROWS = [torch.randint(2, 96, (n,), generator=GENERATOR).tolist() for n in (23, 44, 12, 31)]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": torch.bfloat16}
TOLERANCES = {
    "float32": "fp32",
    "bfloat16": "fp32 compute, bf16 storage",
    "float8_e4m3": "fp32 compute, fp8 storage",
}


def plan_row(ids, mask_of=None):
    mask = mask_of(len(ids)) if mask_of else [0, *[1] * (len(ids) - 1)]
    return SimpleNamespace(
        row_id=row_id_of(ids, mask), conversation_id=str(sum(ids)), split="train", source="test:1",
        input_ids=tuple(ids), loss_mask=tuple(mask),
    )  # fmt: skip


def answers(length):
    """Every fourth token ends a stretch of two supervised ones: states lie between others that are not kept."""
    return [int(p % 4 > 1) for p in range(length)]


def write_store(
    path, model, *, dtype="bfloat16", engine_model=None, layer_ids=IDS, change=None, ids_of=None, mask_of=None
):
    """A store that claims to be of `model`, with a fault planted between the engine and the writer."""
    facts = read_facts(model)
    identity = VerifierIdentity(
        facts.architecture, facts.config_hash, weight_fingerprint(model), facts.hidden_size, facts.num_layers,
        facts.vocab_size, "planted",
    )  # fmt: skip
    engine = HuggingFaceEngine(engine_model or model, facts)
    rows = [plan_row(ids_of(row) if ids_of else row, mask_of) for row in ROWS]
    manifest = Manifest(
        verifier=identity, tokenizer_hash="t", template_hash="t", template_args_hash="t", layer_ids=IDS,
        dtype=dtype, engine={"name": "hf", **engine.versions()},
        last_state_rows="supervised" if mask_of else "all",
    )  # fmt: skip
    with StoreWriter(path, manifest, rows, 64) as writer:
        states = dict(zip([row.row_id for row in rows], engine.capture(ROWS, layer_ids), strict=True))
        for number, shard in writer.pending():
            cast = []
            for row in shard:
                s = change(states[row.row_id], engine) if change else states[row.row_id]
                ids = torch.tensor(row.input_ids)
                cast.append((row, s.aux.to(DTYPES[dtype]), s.last.to(DTYPES[dtype]), ids))
            writer.write_shard(number, cast)
        writer.finish()
    return StoreReader(path)


def swapped(states, _engine):
    first, second, third = states.aux.split(64, dim=-1)
    return replace(states, aux=torch.cat([second, first, third], dim=-1))


def normed(states, engine):
    with torch.no_grad():
        return replace(states, last=engine._inner.norm(states.last))


def message_of(reader, model):
    with pytest.raises(IntegrityError) as caught:
        self_test_store(reader, model, read_facts(model), num_rows=3)
    text = str(caught.value)
    assert f"failed for store {reader.path}" in text
    assert "try: model.path=DIRECTORY of the checkpoint that wrote it (planted)" in text
    return text


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_store_passes(llama, tmp_path, dtype):
    reader = write_store(tmp_path / "store", llama, dtype=dtype)
    report = self_test_store(reader, llama, read_facts(llama), num_rows=3)
    assert report.passed
    assert report.rows == 3
    assert report.tolerance.name == TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_store_of_supervised_last_states_passes(llama, tmp_path, dtype):
    reader = write_store(tmp_path / "store", llama, dtype=dtype, mask_of=answers)
    assert any(row.num_last_states < row.length - 1 for row in reader.rows)
    report = self_test_store(reader, llama, read_facts(llama), num_rows=3)
    assert report.passed
    assert report.argmax_agreement == 1.0
    assert report.rows == 3


def answer_at_end(length):
    return [int(p >= length - 2) for p in range(length)]


def test_an_answer_behind_a_long_prompt_is_reached(llama, tmp_path, monkeypatch):
    """No sampled row has a last state in its first tokens: the one whose answer comes first is read that far."""
    monkeypatch.setattr(self_test, "MAX_TOKENS", 8)
    monkeypatch.setattr(self_test, "ANSWER_TOKENS", 5)
    reader = write_store(tmp_path / "store", llama, mask_of=answer_at_end)
    report = self_test_store(reader, llama, read_facts(llama), num_rows=4)
    assert report.passed
    assert (
        report.tokens == 12 + 3 * 8
    )  # a kept state lies before each of the two supervised tokens: from 9 on
    other = write_store(tmp_path / "other", llama, mask_of=answer_at_end, change=normed)
    with pytest.raises(IntegrityError, match="argmax agreement"):
        self_test_store(other, llama, read_facts(llama), num_rows=4)


def test_a_store_without_any_last_state_cannot_be_tested(llama, tmp_path):
    reader = write_store(tmp_path / "store", llama, mask_of=lambda length: [0] * length)
    with pytest.raises(UserError, match="none of its rows has a supervised token"):
        self_test_store(reader, llama, read_facts(llama))


@pytest.mark.parametrize("mask_of", [None, answers], ids=["all", "supervised"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("fault", "suspect"),
    [
        ({"layer_ids": (3, 4, 5)}, "every aux slot is +1 layer off"),
        ({"change": swapped}, "aux slots are swapped: slot 0 (id 2) holds layer 3"),
        ({"change": normed}, "the last state is post-norm"),
        ({"ids_of": lambda row: [*row[1:], row[0]]}, "the states at position i belong to token i-1"),
        ({"ids_of": lambda row: [row[-1], *row[:-1]]}, "the states at position i belong to token i+1"),
    ],
    ids=["aux_plus_1", "swapped", "post_norm", "ids_plus_1", "ids_minus_1"],
)
def test_a_planted_fault_is_named(llama, tmp_path, fault, suspect, dtype, mask_of):
    reader = write_store(tmp_path / "store", llama, dtype=dtype, mask_of=mask_of, **fault)
    assert suspect in message_of(reader, llama)


@pytest.mark.parametrize("dtype", DTYPES)
def test_states_of_another_checkpoint_are_named(llama, make_model, tmp_path, dtype):
    reader = write_store(tmp_path / "store", llama, dtype=dtype, engine_model=make_model(seed=1))
    assert "another checkpoint of the same shape" in message_of(reader, llama)
