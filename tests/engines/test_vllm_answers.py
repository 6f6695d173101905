"""Answers by vLLM on the CPU in fp32: against Hugging Face where nothing is drawn, and through the pipeline."""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3lab.config.schema import (
    Backend,
    DataConfig,
    EngineConfig,
    ExtractorConfig,
    HardwareConfig,
    ModelConfig,
    SamplingConfig,
    StoreDtype,
)
from eagle3lab.engines.base import Sampling
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.request import EngineRequest
from eagle3lab.store.answers import require_answers
from eagle3lab.store.answers_check import check_answers
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import read_facts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test VLLM=1"
)

SHARED = Path(__file__).parents[1] / "cases" / "_shared"
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 6,
         "max_position_embeddings": 512, "spread": 0.08}  # fmt: skip


def request_for(path: Path, **parallel: int) -> EngineRequest:
    return EngineRequest(
        path, read_facts(path), ModelConfig(name="test"), torch.float32, "cpu", max_len=220, batch_tokens=64,
        parallel=EngineConfig(**parallel),
    )  # fmt: skip


def prompts() -> list[list[int]]:
    g = torch.Generator().manual_seed(1)
    made = [torch.randint(3, 512, (n,), generator=g).tolist() for n in (7, 33, 130, 1)]
    return [*made, made[2][:128] + made[0]]  # the last one shares a prefix


def test_answers_are_hugging_faces_where_nothing_is_drawn_and_repeat_where_it_is(make_model):
    from eagle3lab.engines.vllm_start import start_vllm_answerer

    path = make_model("llama", **SHAPE)
    hf = HuggingFaceEngine(path, read_facts(path))
    most = [20, 5, 30, 12, 25]
    free = hf.answer(prompts(), Sampling(0.0, 1.0, 0, ()), [0] * 5, most)
    stop = free[2].token_ids[9]
    greedy = Sampling(0.0, 0.95, 0, (stop, 1))
    engine = start_vllm_answerer(request_for(path))
    try:
        got = engine.answer(prompts(), greedy, [0] * 5, most)
        assert got == hf.answer(prompts(), greedy, [0] * 5, most)
        assert got[2].ended
        assert got[2].token_ids[-1] == stop
        assert not got[1].ended
        drawn = Sampling(1.0, 0.95, 50, (1,))
        seeds = [2**63 - 1, 1, 2, 3, 3]
        first = engine.answer(prompts(), drawn, seeds, most)
        assert first == engine.answer(prompts(), drawn, seeds, most)
        assert first[0] == engine.answer(prompts()[:1], drawn, seeds[:1], most[:1])[0]
        assert first != engine.answer(prompts(), drawn, [7, 8, 9, 10, 11], most)
        for impossible in ([[]], [[512]], [[5] * 200]):
            with pytest.raises(ValueError, match=r"prompts|ids"):
                engine.answer(impossible, greedy, [0], [30])
        assert engine.versions()["dtype"] == "float32"
    finally:
        engine.close()


def test_a_store_of_generated_answers_is_written_by_two_engines_one_after_the_other(make_model, tmp_path):
    from eagle3lab.extract.pipeline import extract_store

    path = make_model("llama", seed=4, **SHAPE)
    data = tmp_path / "data.jsonl"
    records = [
        {"messages": [{"role": "user", "content": "q" * (i + 1)}, {"role": "assistant", "content": "-"}]}
        for i in range(6)
    ]
    data.write_text("".join(json.dumps(r) + "\n" for r in records))

    def extract(name: str, backend: Backend):
        return extract_store(
            model=ModelConfig(
                name="llama", path=str(path), tokenizer=str(SHARED / "tok_bytes"),
                template=str(SHARED / "templates" / "plain.jinja"), aux_layer_ids=[1, 3, 5],
            ),
            data=DataConfig(
                name="test", paths=[str(data)], max_len=200, regenerate=True,
                sampling=SamplingConfig(temperature=0.0, max_new_tokens=12),
            ),
            extract=ExtractorConfig(
                backend=backend, dtype=StoreDtype.float32, shard_tokens=100, batch_tokens=64,
                scratch_dir=str(tmp_path / "scratch"),
            ),
            hardware=HardwareConfig(name="cpu"), store=tmp_path / name, console=Console(file=io.StringIO()),
        )  # fmt: skip

    report = extract("vllm", Backend.vllm)
    assert report.generated is not None
    assert report.generated.num_answers == report.num_rows == 6
    extract("hf", Backend.hf)
    ours, theirs = StoreReader(tmp_path / "vllm", verify="full"), StoreReader(tmp_path / "hf", verify="full")
    assert check_answers(ours).num_spans == 6
    assert require_answers(tmp_path / "vllm").by_key == require_answers(tmp_path / "hf").by_key
    assert ours.manifest.row_settings["generated_by"]["name"] == "vllm"
    for i in range(6):
        a, b = ours.read(i), theirs.read(i)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=2e-5)


@pytest.mark.slow
def test_two_replicas_share_the_prompts_and_give_the_same_answers(make_model):
    from eagle3lab.engines.vllm_start import start_vllm_answerer

    path = make_model("qwen3", seed=6, **SHAPE)
    greedy, most = Sampling(0.0, 1.0, 0, (1,)), [9, 5, 8, 7, 6]
    engine = start_vllm_answerer(request_for(path, data_parallel=2))
    try:
        got = engine.answer(prompts(), greedy, [0] * 5, most)
    finally:
        engine.close()
    assert got == HuggingFaceEngine(path, read_facts(path)).answer(prompts(), greedy, [0] * 5, most)
