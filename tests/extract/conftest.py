from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random Llama whose layers differ visibly (the default initialisation is almost the identity)."""

    def make(seed: int = 0, unit_norms: bool = False, **changes: Any) -> Path:
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(**{**SHAPE, **changes})).float()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                if "norm" in name:
                    parameter.copy_(torch.ones_like(noise) if unit_norms else 1 + 0.2 * noise)
                else:
                    parameter.copy_(0.1 * noise)
        path = tmp_path_factory.mktemp("llama")
        model.config.dtype = torch.float32
        model.save_pretrained(path)
        return path

    return make


@pytest.fixture(scope="session")
def llama(make_model: Callable[..., Path]) -> Path:
    return make_model()
