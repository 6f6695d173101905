"""Verifiers of every architecture: their edges read by name, their layers captured, quantised experts unpacked."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.rows.render import encode
from eagle3lab.rows.tokenizer import load_tokenizer
from eagle3lab.verifier import weights
from eagle3lab.verifier.checkpoint import tensor_index
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.layer_ids import default_aux_layer_ids
from eagle3lab.verifier.weights import load_edge_weights, verifier_logits

from .checkpoints import COMMON, KINDS

ROWS = [list(range(30, 64)), [257, 104, 105, 258, 7]]  # longer than a sliding window of 16
TWINS = {"gpt_oss_mxfp4": "gpt_oss", "kimi_k25_int4": "kimi_k25"}
Checkpoint = Callable[[str], Path]


def engine_of(path: Path) -> HuggingFaceEngine:
    """Trusted, as Kimi's rows are: code of the model itself would end the test."""
    return HuggingFaceEngine(path, read_facts(path), trust_remote_code=True)


def plain(kind: str, path: Path) -> Any:
    """The model as transformers' own class loads it, past every choice of the engine."""
    return getattr(transformers, KINDS[kind].model).from_pretrained(path, dtype=torch.float32).eval()


@pytest.mark.parametrize("kind", [k for k in KINDS if k not in TWINS])
def test_every_layer_is_captured_and_the_edges_give_the_models_own_logits(
    kind: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint(kind)
    engine, facts = engine_of(path), read_facts(path)
    ids = list(range(1, facts.num_layers))
    reference = plain(kind, checkpoint(f"{kind}.flat") if kind.startswith("kimi") else path)
    captured = engine.capture(ROWS, ids)
    edge = load_edge_weights(facts)
    for row, states in zip(ROWS, captured, strict=True):
        with torch.no_grad():
            out = reference(torch.tensor([row]), output_hidden_states=True)
        slots = states.aux.chunk(len(ids), dim=-1)
        for layer_id, slot in zip(ids, slots, strict=True):
            torch.testing.assert_close(slot, out.hidden_states[layer_id][0], rtol=0, atol=1e-4)
        logits = verifier_logits(states.last, edge, facts.rms_norm_eps)
        torch.testing.assert_close(logits, out.logits[0], rtol=0, atol=2e-4)
    scale = float(captured[0].aux.abs().max())
    assert 1 < scale < 1e3, "layers of a checkpoint that tests nothing"


@pytest.mark.parametrize("kind", TWINS)
def test_quantised_experts_are_unpacked_to_the_values_they_stand_for(
    kind: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint(kind)
    if kind == "kimi_k25_int4" and importlib.util.find_spec("compressed_tensors") is None:
        with pytest.raises(UserError, match="compressed"):
            engine_of(path)
        return
    ours, twin = (engine_of(p) for p in (path, checkpoint(TWINS[kind])))
    for a, b in zip(ours.capture(ROWS, [1, 4]), twin.capture(ROWS, [1, 4]), strict=True):
        assert torch.equal(a.aux, b.aux)
        assert torch.equal(a.last, b.last)


@pytest.mark.parametrize("kind", KINDS)
def test_only_embedding_head_and_norm_are_read_whatever_the_layout(
    kind: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    original = weights._read
    monkeypatch.setattr(weights, "_read", lambda entry: (read.append(entry.name), original(entry))[1])
    facts = read_facts(checkpoint(kind))
    edge = load_edge_weights(facts)
    prefix = "language_model." if "kimi_k25" in kind else ""
    parts = ["model.embed_tokens.weight", "model.norm.weight"]
    parts += [] if facts.tie_word_embeddings else ["lm_head.weight"]
    assert sorted(read) == sorted(prefix + part for part in parts)
    index = tensor_index(facts.path)
    assert len({entry.file for entry in index.values()}) == KINDS[kind].num_shards
    assert edge.embedding is not None
    assert edge.head is not None
    assert edge.embedding.shape == edge.head.shape == (facts.vocab_size, facts.hidden_size)
    assert torch.equal(edge.embedding, original(index[prefix + parts[0]]))


@pytest.mark.parametrize("kind", ["kimi_k2", "kimi_k25"])
def test_the_tokenizer_of_a_kimi_is_its_own_code_and_has_no_offsets(
    kind: str, checkpoint: Checkpoint
) -> None:
    path = checkpoint(kind)
    tokenizer = load_tokenizer(ModelConfig(name=kind, path=str(path), trust_remote_code=True), path)
    assert not tokenizer.is_fast
    assert encode(tokenizer, "hi<|end|>") == [104, 105, 258]
    with pytest.raises(UserError, match="code of its own"):
        load_tokenizer(ModelConfig(name=kind, path=str(path)), path)


def test_a_gemma_beside_a_vision_tower_is_read_and_captured(tmp_path: Path) -> None:
    """The larger ones: nested, prefixed, and with weights that no row meets."""
    config = transformers.Gemma3Config(
        text_config={**COMMON, **KINDS["gemma3"].sizes},
        vision_config={"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
                       "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4, image_token_index=263,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = transformers.Gemma3ForConditionalGeneration(config).float().eval()
    model.save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    assert "language_model.model.norm.weight" in tensor_index(tmp_path)
    (states,) = engine_of(tmp_path).capture(ROWS[:1], [2, 7])
    with torch.no_grad():
        out = model(torch.tensor(ROWS[:1]), output_hidden_states=True)
    wanted = torch.cat([out.hidden_states[k][0] for k in (2, 7)], dim=-1)
    torch.testing.assert_close(states.aux, wanted, rtol=0, atol=1e-5)
    logits = verifier_logits(states.last, load_edge_weights(facts), facts.rms_norm_eps)
    torch.testing.assert_close(logits, out.logits[0], rtol=0, atol=1e-5)


def test_a_head_that_is_quantised_like_the_experts_is_refused(checkpoint: Checkpoint, tmp_path: Path) -> None:
    source = checkpoint("kimi_k25_int4")
    tensors = {k: t for f in sorted(source.glob("*.safetensors")) for k, t in load_file(f).items()}
    packed = torch.zeros(264, 16, dtype=torch.int32)
    tensors |= {"language_model.lm_head.weight_packed": packed}
    del tensors["language_model.lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    with pytest.raises(UserError, match=r"head is quantised: .*language_model.lm_head.weight_packed"):
        load_edge_weights(read_facts(tmp_path))


def test_the_smallest_verifier_of_every_kind_has_the_default_layers(checkpoint: Checkpoint) -> None:
    assert {default_aux_layer_ids(read_facts(checkpoint(kind)).num_layers) for kind in KINDS} == {(2, 4, 5)}
