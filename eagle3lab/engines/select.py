"""Choosing the device, the dtype and the engine that a configuration asks for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3lab.config.schema import (
    Accelerator,
    Backend,
    EngineConfig,
    HardwareConfig,
    ModelConfig,
    Precision,
)
from eagle3lab.engines.base import Engine
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.vllm_start import is_installed, start_vllm
from eagle3lab.verifier.facts import VerifierFacts

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def pick_device(hardware: HardwareConfig) -> str:
    """`cuda` or `cpu`; `auto` is what is visible. `devices.resolve_hardware` refuses what is missing."""
    if hardware.accelerator is Accelerator.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return hardware.accelerator.value


def pick_backend(backend: Backend, device: str) -> Backend:
    """`hf` or `vllm`; `auto` is vllm where it is installed and a CUDA device is there, else hf."""
    if backend is not Backend.auto:
        return backend
    return Backend.vllm if device == "cuda" and is_installed() else Backend.hf


def build_engine(
    backend: Backend,
    path: Path,
    facts: VerifierFacts,
    model: ModelConfig,
    *,
    layer_ids: Sequence[int],
    dtype: torch.dtype,
    device: str,
    max_len: int,
    batch_tokens: int,
    parallel: EngineConfig,
    scratch_dir: Path | None = None,
) -> Engine:
    """The engine that `backend` names, ready to capture `layer_ids` of sequences up to `max_len` tokens.

    batch_tokens, parallel, scratch_dir: of vLLM alone; Hugging Face runs on one device and is given batches.
    """
    if pick_backend(backend, device) is Backend.vllm:
        return start_vllm(
            path,
            facts,
            model,
            layer_ids=layer_ids,
            dtype=dtype,
            device=device,
            max_len=max_len,
            batch_tokens=batch_tokens,
            parallel=parallel,
            scratch_dir=scratch_dir,
        )
    return HuggingFaceEngine(path, facts, dtype, device, model.trust_remote_code)
