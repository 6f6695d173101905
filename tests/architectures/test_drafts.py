"""Drafts for verifiers of every architecture: what they take over, what is exported, and the EXP cases."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3lab.config.schema import ModelConfig
from eagle3lab.draft.export import load_draft, read_export
from eagle3lab.draft.format import config_problems, engine_view, tensor_problems
from eagle3lab.training.report import _engine_options

from .checkpoints import KINDS

LATENT = [k for k in KINDS if k.startswith(("deepseek", "kimi"))]
SERVED = [k for k in KINDS if not k.endswith(("_mxfp4", "_int4"))]  # how experts are kept reaches no draft
Edges = Callable[[str], Any]
MakeDraft = Callable[..., Path]


@pytest.mark.parametrize("kind", SERVED)
def test_positions_and_special_tokens_are_the_verifiers_in_the_draft_and_in_its_file(
    kind: str, edges: Edges, make_draft: MakeDraft
) -> None:
    facts, edge = edges(kind)
    directory = make_draft(kind)
    layer = json.loads((directory / "config.json").read_text())["transformer_layer_config"]
    written = json.loads((facts.path / "config.json").read_text())
    text = written.get("text_config", written)
    scaling = dict(text["rope_scaling"] or {})
    rope = layer["rope_parameters"]
    assert rope["rope_theta"] == text["rope_theta"]
    assert rope["rope_type"] == (scaling.pop("type", None) or scaling.pop("rope_type", "default"))
    assert {k: rope[k] for k in scaling if k != "rope_type"} == {
        k: v for k, v in scaling.items() if k != "rope_type"
    }
    assert "partial_rotary_factor" not in rope  # the draft's heads rotate as a whole
    assert layer["max_position_embeddings"] == text["max_position_embeddings"]
    assert (layer["bos_token_id"], layer["eos_token_id"]) == (256, [258])
    draft: Any = load_draft(directory, facts, edge)
    expected = LlamaRotaryEmbedding(LlamaConfig(
        hidden_size=facts.hidden_size, num_attention_heads=facts.num_heads, head_dim=facts.head_dim,
        max_position_embeddings=facts.max_positions,
        rope_parameters={"rope_theta": text["rope_theta"], **{
            {"type": "rope_type"}.get(k, k): v for k, v in (text["rope_scaling"] or {"rope_type": "default"}).items()
        }},
    ))  # fmt: skip
    assert torch.equal(draft.rotary_emb.inv_freq, expected.inv_freq)
    assert draft.rotary_emb.attention_scaling == expected.attention_scaling


@pytest.mark.parametrize("kind", LATENT)
def test_the_draft_of_latent_attention_is_dense_and_as_wide(kind: str, make_draft: MakeDraft) -> None:
    shape = engine_view(json.loads((make_draft(kind) / "config.json").read_text()))
    assert shape.layer_type == "llama"
    assert (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (128, 4, 4, 32)


@pytest.mark.parametrize("ids", [(4,), (2, 5), (1, 3, 5, 7)])
def test_other_numbers_of_aux_layers_than_three_are_named_where_the_engine_looks(
    ids: tuple[int, ...], make_draft: MakeDraft
) -> None:
    config, tensors = read_export(make_draft("kimi_k25", ids))
    assert config["eagle_aux_hidden_state_layer_ids"] == list(ids)
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == len(ids)
    assert tensors["fc.weight"].shape == (128, 128 * len(ids))


def _nan(t: dict[str, Tensor]) -> None:
    t["embed_tokens.weight"][0, 0] = float("nan")


def _absolute(t: dict[str, Tensor]) -> None:
    t["d2t"] += torch.arange(len(t["d2t"]))


# EXP-01 and EXP-05, whose files have the shapes of one verifier: the same faults in a draft of any
FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], object], str | None]] = {
    "good": (lambda t: None, None),
    "nan_embed": (_nan, "embed_tokens.weight is not finite"),
    "no_lm_head": (lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
    "no_d2t": (lambda t: t.pop("d2t"), "d2t is missing"),
    "zero_fc": (lambda t: t["fc.weight"].zero_(), "fc.weight is all zero"),
    "d2t_absolute": (_absolute, "lies outside the verifier's vocabulary of 264"),
    "fc_for_two_slots": (lambda t: t.update({"fc.weight": t["fc.weight"][:, :256]}), "fc.weight has another shape"),
    "head_full_vocab": (
        lambda t: t.update({"lm_head.weight": t["embed_tokens.weight"]}), "lm_head.weight has another shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", SERVED)
def test_exp_faults_are_named_in_a_draft_of_any_verifier(
    kind: str, edges: Edges, make_draft: MakeDraft
) -> None:
    config, tensors = read_export(make_draft(kind))
    assert torch.equal(tensors["embed_tokens.weight"], edges(kind)[1].embedding)
    for name, (break_it, wanted) in FAULTS.items():
        broken = {key: tensor.clone() for key, tensor in tensors.items()}
        break_it(broken)
        found = tensor_problems(engine_view(config), broken)
        assert len(found) == (wanted is not None), (name, found)
        assert wanted is None or wanted in str(found[0]), name
    nested = copy.deepcopy(config)  # EXP-02
    nested["transformer_layer_config"]["eagle_aux_hidden_state_layer_ids"] = nested.pop(
        "eagle_aux_hidden_state_layer_ids"
    )
    assert "not named at the top level" in str(config_problems(nested)[0])


def test_the_command_that_serves_says_what_the_verifier_needs() -> None:
    kimi = ModelConfig(name="kimi", trust_remote_code=True)
    assert _engine_options(kimi, "KimiK25ForConditionalGeneration") == " --trust-remote-code"
    wanted = ' --hf-overrides \'{"architectures": ["TransformersMoEForCausalLM"]}\''
    assert _engine_options(ModelConfig(name="glm"), "Glm4MoeForCausalLM") == wanted
    assert _engine_options(ModelConfig(name="llama"), "LlamaForCausalLM") == ""
    qwen = ModelConfig(name="qwen", template_args={"enable_thinking": False})
    wanted = """ --default-chat-template-kwargs '{"enable_thinking": false}'"""
    assert _engine_options(qwen, "Qwen3ForCausalLM") == wanted
