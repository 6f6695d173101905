"""Choosing the device, the dtype and the engine that a configuration asks for."""

from __future__ import annotations

import torch

from eagle3lab.config.schema import (
    Accelerator,
    Backend,
    HardwareConfig,
    Precision,
)
from eagle3lab.engines.base import Answerer, Engine
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.vllm_start import is_installed, start_vllm, start_vllm_answerer

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


def build_engine(backend: Backend, request: EngineRequest) -> Engine:
    """The engine that `backend` names, ready to capture `request.layer_ids`."""
    if pick_backend(backend, request.device) is Backend.vllm:
        return start_vllm(request)
    return _hugging_face(request)


def build_answerer(backend: Backend, request: EngineRequest) -> Answerer:
    """The engine that `backend` names, ready to answer prompts; it captures nothing."""
    if pick_backend(backend, request.device) is Backend.vllm:
        return start_vllm_answerer(request)
    return _hugging_face(request)


def _hugging_face(request: EngineRequest) -> HuggingFaceEngine:
    trusted = request.model.trust_remote_code
    return HuggingFaceEngine(request.path, request.facts, request.dtype, request.device, trusted)
