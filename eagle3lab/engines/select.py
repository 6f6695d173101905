"""Choosing the device, the dtype and the engine that a configuration asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from eagle3lab.config.schema import Accelerator, Backend, HardwareConfig, ModelConfig, Precision
from eagle3lab.engines.base import Engine
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.verifier.facts import VerifierFacts

DTYPES = {Precision.fp32: torch.float32, Precision.bf16: torch.bfloat16}


def pick_device(hardware: HardwareConfig) -> str:
    """`cuda` or `cpu`; `auto` is what is visible. `devices.resolve_hardware` refuses what is missing."""
    if hardware.accelerator is Accelerator.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    return hardware.accelerator.value


def build_engine(
    backend: Backend, path: Path, facts: VerifierFacts, model: ModelConfig, *, dtype: torch.dtype, device: str
) -> Engine:
    """The engine that `backend` names; `auto` takes the best one that is installed for `device`."""
    match backend:
        case Backend.auto | Backend.hf:
            return HuggingFaceEngine(path, facts, dtype, device, model.trust_remote_code)
