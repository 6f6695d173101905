"""The published config.json behind each row of conf/model: what of it decides shapes and the number of weights.

Held against: class defaults of transformers that are a published model's (gpt-oss-120b, DeepSeek-V3, GLM-4.5-Air),
slime's launch scripts (Qwen3-14B, -30B-A3B, -235B-A22B, DeepSeek-V3, Kimi-K2, GLM-4.5-Air), keras-hub's presets
(Gemma 3 1B: 999,885,952 weights) and the totals that model cards round.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
import transformers

LLAMA31 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256, "tie_word_embeddings": False}
QWEN3 = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "tie_word_embeddings": False}
QWEN3_MOE = {**QWEN3, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8}
GPT_OSS = {
    "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64, "num_key_value_heads": 8,
    "head_dim": 64, "vocab_size": 201088, "num_experts_per_tok": 4,
}  # fmt: skip
LATENT = {
    "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
KIMI = {
    **LATENT, "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "vocab_size": 163840,
}  # fmt: skip


def _dense(hidden: int, mlp: int, layers: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": layers, "num_attention_heads": heads,
    }  # fmt: skip


PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama31_8b": ("Llama", {**LLAMA31, **_dense(4096, 14336, 32, 32)}),
    "llama33_70b": ("Llama", {**LLAMA31, **_dense(8192, 28672, 80, 64)}),
    "qwen3_4b": ("Qwen3", {**QWEN3, **_dense(2560, 9728, 36, 32), "tie_word_embeddings": True}),
    "qwen3_8b": ("Qwen3", {**QWEN3, **_dense(4096, 12288, 36, 32)}),
    "qwen3_14b": ("Qwen3", {**QWEN3, **_dense(5120, 17408, 40, 40)}),
    "qwen3_32b": ("Qwen3", {**QWEN3, **_dense(5120, 25600, 64, 64)}),
    "qwen3_30b_a3b": ("Qwen3Moe", {**QWEN3_MOE, **_dense(2048, 6144, 48, 32), "moe_intermediate_size": 768}),
    "qwen3_235b": ("Qwen3Moe", {**QWEN3_MOE, **_dense(4096, 12288, 94, 64), "moe_intermediate_size": 1536}),
    "gpt_oss_20b": ("GptOss", {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt_oss_120b": ("GptOss", {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128}),
    "deepseek_v3": ("DeepseekV3", {
        **LATENT, "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "vocab_size": 129280,
    }),
    "kimi_k2": ("DeepseekV3", KIMI),
    "kimi_k25_int4": ("DeepseekV3", KIMI),  # its language model
    "gemma3_1b": ("Gemma3", {
        **_dense(1152, 6912, 26, 4), "num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144,
    }),
    "glm45_air": ("Glm4Moe", {
        **_dense(4096, 10944, 46, 96), "num_key_value_heads": 8, "head_dim": 128, "moe_intermediate_size": 1408,
        "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 1,
        "vocab_size": 151552, "attention_bias": True, "use_qk_norm": False,
    }),
}  # fmt: skip


def published_config(option: str) -> Any:
    """The configuration of transformers with the published values."""
    family, values = PUBLISHED[option]
    name = "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config"
    return getattr(transformers, name)(**values)


@functools.cache
def count_parameters(option: str) -> tuple[int, int]:
    """Weights of the whole model and those that one token meets, by transformers' own modules without storage."""
    config = published_config(option)
    with torch.device("meta"):
        model = getattr(transformers, f"{PUBLISHED[option][0]}ForCausalLM")(config)
    total = active = 0
    weights = [
        *model.named_parameters(),
        *((n, b) for n, b in model.named_buffers() if "correction_bias" in n),
    ]
    for name, parameter in weights:  # a tied head is listed once
        total += parameter.numel()
        used = config.num_experts_per_tok if ".experts." in name else 1
        num_experts = parameter.shape[0] if ".experts." in name else 1
        active += math.ceil(parameter.numel() * used / num_experts)
    return total, active
