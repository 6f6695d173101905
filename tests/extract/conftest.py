from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..architectures.checkpoints import Kind, make_checkpoint

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random Llama whose layers differ visibly."""

    def make(seed: int = 0, unit_norms: bool = False, **changes: Any) -> Path:
        return make_checkpoint(
            tmp_path_factory.mktemp("llama"),
            Kind("LlamaConfig", "LlamaForCausalLM", tokenizer=None),
            seed=seed,
            spread=0.1,
            norm_spread=0.0 if unit_norms else 0.2,
            sizes={**SHAPE, **changes},
        )

    return make


@pytest.fixture(scope="session")
def llama(make_model: Callable[..., Path]) -> Path:
    return make_model()
