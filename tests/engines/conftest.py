from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
KINDS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random model whose layers differ visibly (the default initialisation is almost the identity)."""

    def make(kind: str = "llama", seed: int = 0, spread: float = 0.1, **changes: Any) -> Path:
        config_class, model_class = KINDS[kind]
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SHAPE, **changes})).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else spread * noise)
        path = tmp_path_factory.mktemp(kind)
        model.config.dtype = torch.float32
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def llama(make_model: Callable[..., Path]) -> Path:
    return make_model("llama")


@pytest.fixture(scope="session")
def load_plain() -> Callable[[Path], Any]:
    """The model as transformers loads it: the independent reference of these tests."""
    return lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def make_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random DeepSeek-V3 with latent attention and experts, in the form that Kimi-K2 has."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    def make(*, yarn: bool, seed: int = 0) -> Path:
        torch.manual_seed(seed)
        config = DeepseekV3Config(
            vocab_size=512, hidden_size=128, intermediate_size=256, moe_intermediate_size=64,
            num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1,
            n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
            routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64,
            qk_nope_head_dim=32, v_head_dim=32, max_position_embeddings=512, bos_token_id=0, eos_token_id=1,
            pad_token_id=2, tie_word_embeddings=False, norm_topk_prob=True, num_nextn_predict_layers=0,
        )  # fmt: skip
        model = DeepseekV3ForCausalLM(config).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.08 * noise)
        path = tmp_path_factory.mktemp("deepseek")
        model.config.dtype = torch.float32
        model.save_pretrained(path)
        written = json.loads((path / "config.json").read_text())
        # what the published checkpoints state and transformers does not write
        written |= {"topk_method": "noaux_tc", "scoring_func": "sigmoid", "ep_size": 1, "moe_layer_freq": 1}
        if yarn:
            written["rope_parameters"] = {
                "rope_type": "yarn", "rope_theta": 50000.0, "factor": 64.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 64,
            }  # fmt: skip
            written["max_position_embeddings"] = 4096
        (path / "config.json").write_text(json.dumps(written))
        return path

    return make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if importlib.util.find_spec("vllm") is None:
        terminalreporter.write_sep(
            "!",
            "vllm is NOT INSTALLED: the vLLM backend was not tested (scripts/add_vllm_cpu.sh says why)",
            yellow=True,
        )
