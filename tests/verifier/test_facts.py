from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers

from eagle3lab.config.errors import UserError
from eagle3lab.verifier.facts import VerifierFacts, read_facts

LLAMA31 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "tie_word_embeddings": False,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0",
}
KIMI = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "tie_word_embeddings": False,
    "eos_token_id": 163585,
    "pad_token_id": 163838,
    "text_config": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_hidden_layers": 61,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "num_experts_per_tok": 8,
        "vocab_size": 163840,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096},
        "bos_token_id": 163584,
        "eos_token_id": 163585,
    },
    "vision_config": {"hidden_size": 1152},
}


@pytest.fixture
def facts_of(tmp_path: Path) -> Callable[..., VerifierFacts]:
    def read(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> VerifierFacts:
        (tmp_path / "config.json").write_text(json.dumps(config))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return read_facts(tmp_path)

    return read


def test_old_llama_configuration(facts_of: Callable[..., VerifierFacts]) -> None:
    facts = facts_of(LLAMA31, {"eos_token_id": [128009, 7], "pad_token_id": 9})
    assert (facts.hidden_size, facts.num_layers, facts.num_heads, facts.num_kv_heads) == (4096, 32, 32, 8)
    assert facts.head_dim == 128
    assert facts.rope_parameters["rope_type"] == "llama3"
    assert facts.rope_parameters["rope_theta"] == 500000.0
    assert facts.eos_token_ids == (128001, 128008, 128009, 7)
    assert (facts.bos_token_id, facts.pad_token_id, facts.norm_offset) == (128000, 9, 0.0)


def test_old_and_new_rope_keys_are_read_alike(facts_of: Callable[..., VerifierFacts], tmp_path: Path) -> None:
    old = facts_of(LLAMA31)
    transformers.LlamaConfig(**LLAMA31).save_pretrained(tmp_path)
    assert "rope_parameters" in json.loads((tmp_path / "config.json").read_text())
    assert read_facts(tmp_path).rope_parameters == old.rope_parameters


def test_nested_latent_attention_configuration(facts_of: Callable[..., VerifierFacts]) -> None:
    facts = facts_of(KIMI)
    assert (facts.architecture, facts.model_type) == ("DeepseekV3ForCausalLM", "kimi_k2")
    assert (facts.hidden_size, facts.num_layers, facts.vocab_size) == (7168, 61, 163840)
    # The dense attention it expands to: as many key heads as query heads, each as wide as a value head.
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim) == (64, 64, 128)
    assert (facts.kv_lora_rank, facts.qk_rope_head_dim) == (512, 64)
    assert facts.rope_parameters["rope_type"] == "yarn"
    assert "type" not in facts.rope_parameters
    assert (facts.eos_token_ids, facts.bos_token_id, facts.pad_token_id) == ((163585,), 163584, 163838)


@pytest.mark.parametrize(
    ("name", "norm_offset"),
    [
        ("LlamaConfig", 0.0),
        ("Qwen2Config", 0.0),
        ("Qwen3Config", 0.0),
        ("Qwen3MoeConfig", 0.0),
        ("GptOssConfig", 0.0),
        ("GemmaConfig", 1.0),
        ("Gemma3TextConfig", 1.0),
        ("Qwen3NextConfig", 1.0),
    ],
)
def test_facts_equal_what_transformers_says_of_its_own_files(
    name: str, norm_offset: float, tmp_path: Path
) -> None:
    config = getattr(transformers, name)()
    config.save_pretrained(tmp_path)
    facts = read_facts(tmp_path)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    assert (
        facts.hidden_size,
        facts.intermediate_size,
        facts.num_layers,
        facts.num_heads,
        facts.num_kv_heads,
        facts.head_dim,
        facts.vocab_size,
        facts.max_positions,
        facts.rms_norm_eps,
        facts.tie_word_embeddings,
        facts.model_type,
    ) == (
        config.hidden_size,
        config.intermediate_size,
        config.num_hidden_layers,
        config.num_attention_heads,
        config.num_key_value_heads,
        head_dim,
        config.vocab_size,
        config.max_position_embeddings,
        config.rms_norm_eps,
        config.tie_word_embeddings,
        config.model_type,
    )
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    assert facts.rope_parameters == rope
    assert facts.norm_offset == norm_offset


def test_rotary_head_width_of_latent_attention_is_not_taken_for_the_head(tmp_path: Path) -> None:
    transformers.DeepseekV3Config().save_pretrained(tmp_path)  # writes head_dim 64, the rotary part
    assert read_facts(tmp_path).head_dim == 128


def test_gemma_ties_its_head_without_saying_so(facts_of: Callable[..., VerifierFacts]) -> None:
    config = {k: v for k, v in LLAMA31.items() if k != "tie_word_embeddings"}
    assert not facts_of(config).tie_word_embeddings
    assert facts_of({**config, "model_type": "gemma3_text"}).tie_word_embeddings


@pytest.mark.parametrize(
    "text",
    [
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        {"hidden_size": 5376, "intermediate_size": 21504, "num_hidden_layers": 62, "num_attention_heads": 32,
         "num_key_value_heads": 16, "head_dim": 128, "query_pre_attn_scalar": 168},
    ],
    ids=["gemma-3-4b-it", "gemma-3-27b-it"],
)  # fmt: skip
def test_what_a_published_gemma_leaves_to_its_class_is_the_classs(
    text: dict[str, Any], facts_of: Callable[..., VerifierFacts]
) -> None:
    text |= {
        "model_type": "gemma3_text",
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    facts = facts_of({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text})
    config = transformers.Gemma3TextConfig(**text)
    assert facts.rope_parameters == config.rope_parameters["full_attention"]
    assert (facts.num_heads, facts.num_kv_heads, facts.head_dim, facts.vocab_size) == (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.vocab_size,
    )  # fmt: skip
    assert (facts.max_positions, facts.rms_norm_eps) == (config.max_position_embeddings, config.rms_norm_eps)
    assert (facts.tie_word_embeddings, facts.norm_offset) == (True, 1.0)


def test_multimodal_rope_is_plain_for_text(facts_of: Callable[..., VerifierFacts]) -> None:
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    facts = facts_of({**LLAMA31, "rope_theta": 1e6, "rope_scaling": rope})
    assert facts.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


def test_full_attention_rope_is_taken_where_layer_types_differ(
    facts_of: Callable[..., VerifierFacts],
) -> None:
    full = {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}
    sliding = {"rope_type": "default", "rope_theta": 1e4}
    config = {**LLAMA31, "rope_parameters": {"sliding_attention": sliding, "full_attention": full}}
    assert facts_of(config).rope_parameters == full


def test_width_of_a_model_of_experts_only(facts_of: Callable[..., VerifierFacts]) -> None:
    config = {k: v for k, v in LLAMA31.items() if k != "intermediate_size"}
    assert (
        facts_of({**config, "moe_intermediate_size": 512, "num_experts_per_tok": 8}).intermediate_size == 4096
    )


def test_config_hash_ignores_the_writer_and_nothing_else(facts_of: Callable[..., VerifierFacts]) -> None:
    first = facts_of(LLAMA31).config_hash
    resaved = {**LLAMA31, "transformers_version": "5.19.0", "dtype": "bfloat16", "_name_or_path": "x"}
    assert facts_of(dict(reversed(resaved.items()))).config_hash == first
    assert facts_of({**LLAMA31, "rope_theta": 10000.0}).config_hash != first


def test_every_missing_key_is_named_at_once(facts_of: Callable[..., VerifierFacts]) -> None:
    config = {k: v for k, v in LLAMA31.items() if k not in ("hidden_size", "rms_norm_eps")}
    with pytest.raises(UserError) as error:
        facts_of({**config, "num_hidden_layers": "32", "num_key_value_heads": 5})
    text = str(error.value)
    assert len(error.value.problems) == 4
    for word in ("hidden_size", "rms_norm_eps", "num_hidden_layers: '32'", "num_key_value_heads: 5"):
        assert word in text


@pytest.mark.parametrize(
    "wrong",
    [
        {"architectures": "LlamaForCausalLM"},
        {"architectures": True},
        {"tie_word_embeddings": "false"},
        {"rms_norm_eps": float("inf")},
        {"rope_parameters": "llama3"},
        {"rope_scaling": [8.0]},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "10k"}},
    ],
)
def test_values_of_another_kind_are_named(
    wrong: dict[str, Any], facts_of: Callable[..., VerifierFacts]
) -> None:
    ((name, value),) = wrong.items()
    with pytest.raises(UserError, match=name) as error:
        facts_of({**LLAMA31, **wrong})
    assert repr(value) in str(error.value)


@pytest.mark.parametrize(
    "transform", [{"final_logit_softcapping": 30.0}, {"logits_scaling": 8.0}, {"logit_scale": 0.0625}]
)
def test_logit_transforms_are_refused(
    transform: dict[str, float], facts_of: Callable[..., VerifierFacts]
) -> None:
    with pytest.raises(UserError, match=next(iter(transform))):
        facts_of({**LLAMA31, **transform})


@pytest.mark.parametrize("eos", [-1, [128001, -1], 128256, 1.5, True, "128001"])
def test_an_end_token_that_is_no_token_is_refused(eos: Any, facts_of: Callable[..., VerifierFacts]) -> None:
    with pytest.raises(UserError, match="eos_token_id"):
        facts_of(LLAMA31, {"eos_token_id": eos})


@pytest.mark.parametrize("name", ["bos_token_id", "pad_token_id"])
@pytest.mark.parametrize("value", ["1", 1.0, True, [1], {"id": 1}])
def test_a_token_of_another_kind_is_named(
    name: str, value: Any, facts_of: Callable[..., VerifierFacts]
) -> None:
    with pytest.raises(UserError, match=name) as error:
        facts_of({**LLAMA31, name: value}, {name: 1})  # the right one beside it does not hide it
    assert repr(value) in str(error.value)
    assert facts_of({**LLAMA31, "pad_token_id": -1}, {}).pad_token_id == -1  # written for none


@pytest.mark.parametrize("depth", [700, 100_000])
def test_a_configuration_nested_without_end_is_a_users_error(depth: int, tmp_path: Path) -> None:
    nested = json.dumps({**LLAMA31, "extra": 0}).replace('"extra": 0', f'"extra": {"[" * depth}{"]" * depth}')
    (tmp_path / "config.json").write_text(nested)
    with pytest.raises(UserError, match=r"config\.json"):
        read_facts(tmp_path)


def test_missing_directory_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such verifier directory.*\n.*model\.path="):
        read_facts(tmp_path / "absent")
    with pytest.raises(UserError, match=r"has no config\.json"):
        read_facts(tmp_path)


def test_hub_cache_folder_is_recognised(tmp_path: Path) -> None:
    snapshot = tmp_path / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(UserError, match=f"model.path={snapshot}"):
        read_facts(tmp_path)


def test_broken_json_is_a_users_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        read_facts(tmp_path)


def test_facts_layer_ids_and_locate_import_no_torch() -> None:
    code = (
        "import sys, eagle3lab.verifier.facts, eagle3lab.verifier.layer_ids, eagle3lab.verifier.locate;"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'numpy')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=Path(__file__).parents[2])
