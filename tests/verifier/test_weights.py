from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.verifier import weights
from eagle3lab.verifier.facts import PLUS_ONE_NORM_TYPES, read_facts
from eagle3lab.verifier.weights import final_norm, load_edge_weights, verifier_logits

from .conftest import CONFIG, HIDDEN, VOCAB

EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
SINGLE = "model.safetensors"
Make = Callable[..., Path]
Tensors = dict[str, Tensor]


def assert_loads(directory: Path, expected: Tensors) -> None:
    edge = load_edge_weights(read_facts(directory))
    assert torch.equal(edge.embedding, expected[EMBEDDING])
    assert torch.equal(edge.head, expected[HEAD])
    assert torch.equal(edge.norm, expected[NORM])


def two_shards(tensors: Tensors) -> dict[str, Tensors]:
    names = list(tensors)
    return {
        "model-00001-of-00002.safetensors": {n: tensors[n] for n in names[:2]},
        "model-00002-of-00002.safetensors": {n: tensors[n] for n in names[2:]},
    }


def test_single_file(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    assert_loads(make_checkpoint({SINGLE: edge_tensors}), edge_tensors)


@pytest.mark.parametrize("index", [True, False])
def test_shards_with_and_without_index(index: bool, make_checkpoint: Make, edge_tensors: Tensors) -> None:
    assert_loads(make_checkpoint(two_shards(edge_tensors), index=index), edge_tensors)


@pytest.mark.parametrize(
    ("text", "head"),
    [
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("language_model.", ""),
        ("thinker.model.", "thinker."),
        ("", ""),
    ],
)
def test_prefixes_and_nested_configurations(
    text: str, head: str, make_checkpoint: Make, edge_tensors: Tensors
) -> None:
    renamed = {k.replace("model.", text, 1): v for k, v in edge_tensors.items() if k != HEAD}
    renamed[f"{head}lm_head.weight"] = edge_tensors[HEAD]
    # Copies inside a multi-token-prediction layer are other tensors.
    renamed[f"{text}layers.61.embed_tokens.weight"] = torch.zeros(VOCAB, HIDDEN)
    nested = {"model_type": "outer", "text_config": CONFIG, "vision_config": {"hidden_size": 3}}
    assert_loads(make_checkpoint({SINGLE: renamed}, config=nested), edge_tensors)


def test_tied_head_is_the_embedding_itself(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    del edge_tensors[HEAD]
    facts = read_facts(
        make_checkpoint({SINGLE: edge_tensors}, config={**CONFIG, "tie_word_embeddings": True})
    )
    edge = load_edge_weights(facts)
    assert edge.head is edge.embedding
    alone = load_edge_weights(facts, parts=["head"])
    assert alone.embedding is None
    assert alone.norm is None
    assert torch.equal(alone.head, edge_tensors[EMBEDDING])


def test_tied_configuration_with_another_head_is_refused(
    make_checkpoint: Make, edge_tensors: Tensors
) -> None:
    directory = make_checkpoint({SINGLE: edge_tensors}, config={**CONFIG, "tie_word_embeddings": True})
    with pytest.raises(UserError, match="differs from the embedding"):
        load_edge_weights(read_facts(directory))


def test_only_what_is_asked_for_is_read(
    make_checkpoint: Make, edge_tensors: Tensors, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = read_facts(make_checkpoint(two_shards(edge_tensors), index=True))
    opened: list[str] = []
    real = weights.safe_open

    def recording(file: Path, **kwargs: Any) -> Any:
        opened.append(Path(file).name)
        return real(file, **kwargs)

    monkeypatch.setattr(weights, "safe_open", recording)
    edge = load_edge_weights(facts, parts=["norm"], dtype=torch.bfloat16)
    assert (edge.embedding, edge.head, edge.norm.dtype) == (None, None, torch.bfloat16)
    assert opened == ["model-00001-of-00002.safetensors"]


def test_missing_head_is_explained(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    del edge_tensors[HEAD]
    with pytest.raises(UserError, match=r'no head.*\n.*"tie_word_embeddings": true'):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


def test_similar_names_are_shown(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    edge_tensors["decoder.embed_tokens.weight"] = edge_tensors.pop(EMBEDDING)
    with pytest.raises(UserError, match=r"no embedding.*decoder\.embed_tokens\.weight"):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


def test_two_candidates_are_refused(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    edge_tensors["language_model.lm_head.weight"] = torch.zeros(VOCAB, HIDDEN)
    with pytest.raises(UserError, match="two tensors for the head"):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


@pytest.mark.parametrize("suffix", ["weight_packed", "qweight", "weight_scale", "weight_blocks"])
def test_packed_head_is_refused(suffix: str, make_checkpoint: Make, edge_tensors: Tensors) -> None:
    del edge_tensors[HEAD]
    edge_tensors[f"lm_head.{suffix}"] = torch.zeros(VOCAB, 1, dtype=torch.int32)
    with pytest.raises(UserError, match=rf"head is quantised.*lm_head\.{suffix}"):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


def test_fp8_embedding_is_refused(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    edge_tensors[EMBEDDING] = edge_tensors[EMBEDDING].to(torch.float8_e4m3fn)
    with pytest.raises(UserError, match=r"embedding is quantised.*F8_E4M3"):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


def test_head_bias_is_refused(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    edge_tensors["lm_head.bias"] = torch.zeros(VOCAB)
    with pytest.raises(UserError, match=r"bias.*lm_head\.bias"):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


def test_padded_vocabulary_must_be_in_the_configuration(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    edge_tensors[HEAD] = torch.zeros(VOCAB + 4, HIDDEN)
    with pytest.raises(UserError, match=rf'\[{VOCAB + 4}, {HIDDEN}\].*\n.*"vocab_size": {VOCAB + 4}'):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))


def test_wrong_shapes_come_together(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    directory = make_checkpoint({SINGLE: edge_tensors}, config={**CONFIG, "hidden_size": 2 * HIDDEN})
    with pytest.raises(UserError) as error:
        load_edge_weights(read_facts(directory))
    assert len(error.value.problems) == 3


def test_a_header_that_describes_other_bytes_is_an_integrity_error(
    make_checkpoint: Make, edge_tensors: Tensors
) -> None:
    directory = make_checkpoint({SINGLE: edge_tensors})
    file = directory / SINGLE
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F16"'))
    with pytest.raises(IntegrityError, match=r"model\.safetensors is damaged"):
        load_edge_weights(read_facts(directory))


def test_unknown_part_is_a_programming_error(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    with pytest.raises(ValueError, match="lm_head"):
        load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})), parts=["lm_head"])


@pytest.mark.parametrize(
    ("model_type", "module", "name"),
    [
        ("llama", "llama", "LlamaRMSNorm"),
        ("qwen3", "qwen3", "Qwen3RMSNorm"),
        ("qwen3_moe", "qwen3_moe", "Qwen3MoeRMSNorm"),
        ("gpt_oss", "gpt_oss", "GptOssRMSNorm"),
        ("deepseek_v3", "deepseek_v3", "DeepseekV3RMSNorm"),
        ("gemma3n_text", "gemma3n", "Gemma3nRMSNorm"),
        ("gemma", "gemma", "GemmaRMSNorm"),
        ("gemma2", "gemma2", "Gemma2RMSNorm"),
        ("gemma3_text", "gemma3", "Gemma3RMSNorm"),
        ("vaultgemma", "vaultgemma", "VaultGemmaRMSNorm"),
        ("qwen3_next", "qwen3_next", "Qwen3NextRMSNorm"),
        ("qwen3_5_text", "qwen3_5", "Qwen3_5RMSNorm"),
        ("qwen3_5_moe_text", "qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
        ("minimax_m3_vl_text", "minimax_m3_vl", "MiniMaxM3VLRMSNorm"),
        ("step3p5", "step3p7", "Step3p7RMSNorm"),
    ],
)
def test_final_norm_equals_the_model_types_own_module(
    model_type: str, module: str, name: str, make_checkpoint: Make, edge_tensors: Tensors
) -> None:
    modeling = importlib.import_module(f"transformers.models.{module}.modeling_{module}")
    config = {**CONFIG, "model_type": model_type, "tie_word_embeddings": False}
    facts = read_facts(make_checkpoint({SINGLE: edge_tensors}, config=config))
    norm = getattr(modeling, name)(HIDDEN, eps=facts.rms_norm_eps)
    with torch.no_grad():
        norm.weight.copy_(edge_tensors[NORM])
        hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(0)) * 40
        expected = norm(hidden)
    loaded = load_edge_weights(facts, parts=["norm"]).norm
    torch.testing.assert_close(final_norm(hidden, loaded, facts.rms_norm_eps), expected, rtol=1e-6, atol=1e-6)


def test_offset_is_added_before_the_cast(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    facts = read_facts(
        make_checkpoint({SINGLE: edge_tensors}, config={**CONFIG, "model_type": "gemma3_text"})
    )
    assert facts.model_type in PLUS_ONE_NORM_TYPES
    loaded = load_edge_weights(facts, parts=["norm"], dtype=torch.bfloat16).norm
    assert torch.equal(loaded, (edge_tensors[NORM] + 1.0).bfloat16())


def test_norm_is_computed_in_fp32_whatever_comes_in() -> None:
    hidden = torch.full((1, 4), 300.0, dtype=torch.float16)  # its square overflows fp16
    assert torch.equal(final_norm(hidden, torch.ones(4), 1e-5), torch.ones(1, 4, dtype=torch.float16))


def test_logits_need_head_and_norm(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    edge = load_edge_weights(read_facts(make_checkpoint({SINGLE: edge_tensors})))
    hidden = torch.randn(2, 3, HIDDEN, generator=torch.Generator().manual_seed(1))
    assert verifier_logits(hidden, edge, 1e-5).shape == (2, 3, VOCAB)
    with pytest.raises(ValueError, match="head and norm"):
        verifier_logits(hidden, replace(edge, head=None), 1e-5)
