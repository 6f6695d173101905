"""EXT-03 and EXT-14: an engine that answers in another form, late, or not at all."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from eagle3lab.config.errors import IntegrityError
from eagle3lab.engines.base import States, check_states
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.vllm_worker import one_answer
from eagle3lab.store.reader import StoreReader

CASES = Path(__file__).parent


def load(file: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_list_of_layers(answer: object) -> bool:
    return isinstance(answer, list) and all(isinstance(layer, np.ndarray) for layer in answer)


def as_states(layers: list[np.ndarray], token_ids: list[int]) -> States:
    """Four layers of a call's answer: three aux layers and the last."""
    aux = torch.cat([torch.from_numpy(layer) for layer in layers[:-1]], dim=-1)
    return States(torch.tensor(token_ids), aux, torch.from_numpy(layers[-1]))


@pytest.mark.parametrize("executor", ["ListPerRank", "BareReply"])
@pytest.mark.parametrize("options", [{}, {"unique_reply_rank": 0}])
def test_ext_03_an_answer_is_told_by_its_structure(executor, options):
    fake = load(CASES / "EXT-03" / "fake_executor.py")
    answer = getattr(fake, executor)().collective_rpc("capture", **options)
    layers = one_answer(answer, is_list_of_layers)
    assert [float(layer[0, 0]) for layer in layers] == [2.0, 4.0, 5.0, 8.0]
    assert {layer.shape for layer in layers} == {(5, 16)}
    check_states(as_states(layers, [7, 8, 9, 10, 11]), [7, 8, 9, 10, 11], 3, 16)


def test_ext_03_a_stale_answer_is_an_error():
    fake = load(CASES / "EXT-03" / "fake_executor.py")
    layers = one_answer(fake.StaleFirst().collective_rpc("capture"), is_list_of_layers)
    with pytest.raises(IntegrityError, match=r"\(3, 48\).*expected \(5, 48\)"):
        check_states(as_states(layers, [7, 8, 9, 10, 11]), [7, 8, 9, 10, 11], 3, 16)


def flaky_capture(monkeypatch, tried: list[int]) -> None:
    """The case's backend in place of the engine, once the self-test is over; it knows rows by their question."""
    flaky = load(CASES / "EXT-14" / "flaky_backend.py")
    capture = HuggingFaceEngine.capture

    def by_row(self, rows, layer_ids):
        answers = []
        for row in rows:
            index = bytes(token for token in row if token < 256).decode().partition("q")[2][:1]
            tried.append(int(index))
            answered = flaky.extract(int(index), row)
            answers.append(capture(self, [row], layer_ids)[0] if answered is not None else None)
        return answers

    def passes(engine, *_args, **_kwargs):
        monkeypatch.setattr(HuggingFaceEngine, "capture", by_row)
        return tested(engine, *_args, **_kwargs)

    import eagle3lab.extract.self_test as self_test

    original = self_test.self_test_engine

    def tested(engine, *args, **kwargs):
        monkeypatch.setattr(HuggingFaceEngine, "capture", capture)
        try:
            return original(engine, *args, **kwargs)
        finally:
            monkeypatch.setattr(HuggingFaceEngine, "capture", by_row)

    monkeypatch.setattr(self_test, "self_test_engine", passes)


@pytest.mark.parametrize("shard_tokens", [16384, 1])
def test_ext_14_lost_rows_are_counted_named_and_tried_again(
    extract_command, monkeypatch, tmp_path, shard_tokens
):
    want = json.loads((CASES / "EXT-14" / "expected.json").read_text())
    tried: list[int] = []
    options = (f"extract.shard_tokens={shard_tokens}", "data.validation_share=0")
    with monkeypatch.context() as patch:
        flaky_capture(patch, tried)
        done = extract_command("EXT-14", *options, expect=2)
    lost = len(want["failed"])
    assert f"{lost} of 5 rows were lost" in done.err
    assert f"(TimeoutError 2, empty result 1); {want['written']} were captured" in done.err
    for index in want["failed"]:
        assert f"data.jsonl:{int(index) + 1} (" in done.err
        assert tried.count(int(index)) >= 2  # once more before it counted as lost
    assert "Traceback" not in done.err
    log = json.loads((tmp_path / "store" / "logs" / "extract.json").read_text())["runs"][-1]
    assert log["num_captured_rows"] == want["written"]
    assert [reason.partition(":")[0] for reason in log["lost"].values()] == list(want["failed"].values())

    again: list[int] = []
    capture = HuggingFaceEngine.capture

    def seen(self, rows, layer_ids):
        again.extend(int(bytes(t for t in row if t < 256).decode().partition("q")[2][:1]) for row in rows)
        return capture(self, rows, layer_ids)

    monkeypatch.setattr(HuggingFaceEngine, "capture", seen)
    done = extract_command("EXT-14", *options)
    self_tested = 2
    assert sorted(again[self_tested:]) == [1, 3, 4]
    assert not (tmp_path / "store" / "partial").exists()

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceEngine, "capture", capture)
        extract_command("EXT-14", *options, store="whole")
    got, whole = StoreReader(tmp_path / "store"), StoreReader(tmp_path / "whole")
    for i in range(5):
        for name, tensor in got.read(i).items():
            torch.testing.assert_close(tensor, whole.read(i)[name], rtol=0.02, atol=1e-3)
