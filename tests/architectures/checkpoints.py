"""Tiny random checkpoints of the architectures in conf/model: published names, nesting and quantisation layout.

Heads are 32 wide, what the CPU build of vLLM takes at least. Byte b is token b.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from .quantised import int4_experts, mxfp4_experts

SHARED = Path(__file__).parent.parent / "cases" / "_shared"
SHARD = "model-{:05d}-of-{:05d}.safetensors"
INDEX = "model.safetensors.index.json"

COMMON = {
    "vocab_size": 264,  # of the byte tokenizer
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 8,  # the default aux layers are then 2, 4 and 5
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 258,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# Scalings as published, over an original length of 64 positions instead of thousands.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip


def yarn(theta: float, factor: float, **more: Any) -> dict[str, Any]:
    """Sizes of a verifier whose positions are stretched from 64 by `factor`."""
    rope = {
        "rope_type": "yarn", "rope_theta": theta, "factor": factor, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 64, **more,
    }  # fmt: skip
    return {"rope_parameters": rope, "max_position_embeddings": int(64 * factor)}


MSCALE = {"mscale": 1.0, "mscale_all_dim": 1.0}
KIMI_ROPE = {**MSCALE, "beta_fast": 1.0}
LATENT = {
    "num_key_value_heads": 4, "moe_intermediate_size": 64, "n_shared_experts": 1, "n_routed_experts": 8,
    "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512, "q_lora_rank": 64, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32,
    "norm_topk_prob": True, "num_nextn_predict_layers": 0, "head_dim": 64,
}  # fmt: skip
# what published checkpoints of these state and transformers does not write
LATENT_KEYS = {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "moe_layer_freq": 1}
OWN_CODE = {
    "AutoConfig": "configuration_deepseek.DeepseekV3Config",
    "AutoModel": "modeling_deepseek.DeepseekV3Model",
    "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
}
ONE_GROUP = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827}


@dataclass(frozen=True)
class Kind:
    """An architecture: the classes of transformers that hold it, its sizes, and how its files differ from theirs."""

    config: str
    model: str
    sizes: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)  # of config.json, beside what transformers writes
    plus_one: bool = False  # norms multiply by 1 + weight
    num_shards: int = 1
    tokenizer: str | None = "tok_bytes"
    layout: Callable[[Path], None] | None = None  # rewrites the directory in place


def _text_under(prefix: str, keys: Mapping[str, Any]) -> Callable[[Path], None]:
    """The language model as the text part of a multimodal one: its configuration nested, its tensors prefixed."""

    def rewrite(path: Path) -> None:
        text = json.loads((path / "config.json").read_text())
        shared = {k: text[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id", "dtype")}
        _write_json(path / "config.json", {**shared, **keys, "text_config": text})
        tensors = load_file(path / "model.safetensors")
        _save({f"{prefix}{name}": tensor for name, tensor in tensors.items()}, path / "model.safetensors")

    return rewrite


def _quantise(experts: Callable[..., Any], **how: Any) -> Callable[[Path], None]:
    """Experts in a published quantised form, or (`dequantised`) with the values that form stands for."""

    def rewrite(path: Path) -> None:
        tensors, quantisation = experts(load_file(path / "model.safetensors"), **how)
        _save(tensors, path / "model.safetensors")
        written = json.loads((path / "config.json").read_text())
        _write_json(path / "config.json", {**written, **quantisation})

    return rewrite


def _both(*steps: Callable[[Path], None]) -> Callable[[Path], None]:
    def rewrite(path: Path) -> None:
        for step in steps:
            step(path)

    return rewrite


GPT_OSS = Kind(
    "GptOssConfig", "GptOssForCausalLM",
    {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128, "sliding_window": 16,
     **yarn(150000.0, 32.0, truncate=False)},
)  # fmt: skip
KIMI_K25 = Kind(
    "DeepseekV3Config", "DeepseekV3ForCausalLM", {**LATENT, **ONE_GROUP, **yarn(50000.0, 64.0, **KIMI_ROPE)},
    {**LATENT_KEYS, "model_type": "kimi_k2"}, num_shards=3, tokenizer="tok_slow",
)  # fmt: skip
NESTED = _text_under(
    "language_model.",
    {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
        "auto_map": {"AutoConfig": "configuration_kimi_k25.KimiK25Config",
                     "AutoModelForCausalLM": "modeling_kimi_k25.KimiK25ForConditionalGeneration"},
        "media_placeholder_token_id": 263,
        "vision_config": {"vt_hidden_size": 64, "vt_intermediate_size": 64, "vt_num_attention_heads": 2,
                          "vt_num_hidden_layers": 1, "mm_hidden_size": 64, "text_hidden_size": 128},
    },
)  # fmt: skip
UNPACKED_INT4 = _quantise(int4_experts, dequantised=True)

KINDS: dict[str, Kind] = {
    "llama": Kind("LlamaConfig", "LlamaForCausalLM", {"rope_parameters": LLAMA3_ROPE}, num_shards=2),
    "qwen3": Kind("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3_tied": Kind("Qwen3Config", "Qwen3ForCausalLM", {"tie_word_embeddings": True}),
    "qwen3_moe": Kind(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "gpt_oss": replace(GPT_OSS, layout=_quantise(mxfp4_experts, dequantised=True)),
    "gpt_oss_mxfp4": replace(GPT_OSS, layout=_quantise(mxfp4_experts)),
    "deepseek_v3": Kind(
        "DeepseekV3Config", "DeepseekV3ForCausalLM", {**LATENT, **yarn(10000.0, 40.0, **MSCALE)},
        {**LATENT_KEYS, "auto_map": OWN_CODE}, num_shards=2,
    ),
    "deepseek_v3_plain_rope": Kind("DeepseekV3Config", "DeepseekV3ForCausalLM", LATENT, LATENT_KEYS),
    "kimi_k2": replace(
        KIMI_K25, sizes={**KIMI_K25.sizes, **yarn(50000.0, 32.0, **KIMI_ROPE)},
        keys={**KIMI_K25.keys, "auto_map": OWN_CODE},
    ),
    "kimi_k25": replace(KIMI_K25, layout=_both(UNPACKED_INT4, NESTED)),
    "kimi_k25_int4": replace(KIMI_K25, layout=_both(_quantise(int4_experts), NESTED)),
    "gemma3": Kind(
        "Gemma3TextConfig", "Gemma3ForCausalLM",
        {"tie_word_embeddings": True, "sliding_window": 16, "query_pre_attn_scalar": 32,
         "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"] * 2,
         "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
                             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0}}},
        {"rope_local_base_freq": 10000.0, "sliding_window_pattern": 4}, plus_one=True,
    ),
    "glm4_moe": Kind(
        "Glm4MoeConfig", "Glm4MoeForCausalLM",
        {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "n_shared_experts": 1,
         "first_k_dense_replace": 1, "routed_scaling_factor": 1.0, "attention_bias": True, "use_qk_norm": False,
         "num_nextn_predict_layers": 0,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0, "partial_rotary_factor": 0.5}},
    ),
}  # fmt: skip


def make_checkpoint(
    path: Path,
    kind: str | Kind,
    *,
    seed: int = 0,
    spread: float = 0.08,
    norm_spread: float = 0.2,
    sizes: Mapping[str, Any] | None = None,
) -> Path:
    """Write a checkpoint of `kind` in fp32 into `path`, with a tokenizer and a chat template beside it.

    Its layers differ visibly: the default initialisation of transformers is almost the identity. `sizes`
    replace those of the kind.
    """
    made = KINDS[kind] if isinstance(kind, str) else kind
    config = getattr(transformers, made.config)(**{**COMMON, **made.sizes, **(sizes or {})})
    torch.manual_seed(seed)
    model = getattr(transformers, made.model)(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(norm_spread * noise + (not made.plus_one) if "norm" in name else spread * noise)
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    written = _with_old_rope(json.loads((path / "config.json").read_text()))
    _write_json(path / "config.json", {**written, **made.keys})
    if made.layout is not None:
        made.layout(path)
    if made.num_shards > 1:
        _shard(path, made.num_shards)
    _add_own_code(path)
    if made.tokenizer is not None:
        add_tokenizer(path, made.tokenizer)
    return path


def _with_old_rope(config: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters under the keys of the published files: `rope_theta` beside `rope_scaling`."""
    rope = config.pop("rope_parameters")
    rope = dict(rope.get("full_attention", rope))
    found = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": None}
    if "partial_rotary_factor" in rope:
        found["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    if rope["rope_type"] != "default":
        found["rope_scaling"] = rope
        if rope["rope_type"] == "yarn":
            rope["type"] = rope.pop("rope_type")
    return {**config, **found}


CONFIGURATION = """from transformers import PretrainedConfig


class {name}(PretrainedConfig):
    def __init__(self, max_position_embeddings=4096, rope_theta=10000.0, rope_scaling=None, **kwargs):
        self.max_position_embeddings = max_position_embeddings
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        super().__init__(**kwargs)
"""


def _add_own_code(path: Path) -> None:
    """The modules that `auto_map` names. Loading the tokenizer reads the configuration's; the model's is not to run."""
    named = json.loads((path / "config.json").read_text()).get("auto_map", {})
    for module, name in (target.split(".") for target in named.values()):
        is_configuration = module.startswith("configuration")
        text = "raise ImportError('the code of the model itself was run')\n"
        (path / f"{module}.py").write_text(CONFIGURATION.format(name=name) if is_configuration else text)


def add_tokenizer(path: Path, name: str = "tok_bytes") -> None:
    """A tokenizer of the shipped cases with the plain chat template."""
    for file in (SHARED / name).iterdir():
        if file.is_file():
            shutil.copyfile(file, path / file.name)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (SHARED / "templates" / "plain.jinja").read_text()
    _write_json(path / "tokenizer_config.json", settings)


def _shard(path: Path, number: int) -> None:
    """model.safetensors as `number` files and an index; neighbours lie in different ones."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {name: SHARD.format(i % number + 1, number) for i, name in enumerate(names)}
    for file in sorted(set(weight_map.values())):
        _save({name: tensors[name] for name in names if weight_map[name] == file}, path / file)
    size = sum(tensor.nbytes for tensor in tensors.values())
    _write_json(path / INDEX, {"metadata": {"total_size": size}, "weight_map": weight_map})


def _save(tensors: Mapping[str, Tensor], path: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"}
    )


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
