from __future__ import annotations

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

    def make(kind: str = "llama", seed: int = 0, **changes: Any) -> Path:
        config_class, model_class = KINDS[kind]
        torch.manual_seed(seed)
        model = model_class(config_class(**{**SHAPE, **changes})).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
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
