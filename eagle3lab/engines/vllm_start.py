"""From a configuration to a running vLLM backend: settings, scratch directory, one runner or several."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from pathlib import Path

import torch

from eagle3lab.config.errors import UserError
from eagle3lab.config.plan_fit import undivided_heads
from eagle3lab.config.schema import EngineConfig
from eagle3lab.engines.replicas import RemoteRunner, device_groups
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.vllm_answers import VllmAnswerer
from eagle3lab.engines.vllm_engine import DecodingRunner, EngineRunner, VllmEngine
from eagle3lab.engines.vllm_files import Scratch
from eagle3lab.engines.vllm_settings import Decoding, VllmSettings


def is_installed() -> bool:
    """Whether there is a vllm to import; it is not imported."""
    return importlib.util.find_spec("vllm") is not None


def start_vllm(request: EngineRequest) -> VllmEngine:
    """Load the verifier into `parallel.data_parallel` engines of `parallel.tensor_parallel` devices each.

    They capture `request.layer_ids` and always the last state.
    Raises:
        UserError: vllm is missing, too old or cannot run this verifier; too few devices; no scratch directory.
    """
    _check_heads(request)
    facts = request.facts
    scratch = Scratch(request.scratch_dir)
    layer_ids = tuple(sorted({*request.layer_ids, facts.num_layers}))
    settings = _settings(request, layer_ids, scratch.path)
    try:
        return VllmEngine(_runners(settings, request.parallel), settings, facts, scratch)
    except BaseException:
        scratch.close()
        raise


def start_vllm_answerer(request: EngineRequest) -> VllmAnswerer:
    """The same for engines that answer prompts: nothing of capture is in them, nor in their way.

    Raises UserError as `start_vllm`.
    """
    _check_heads(request)
    settings = _settings(request, (), None)
    return VllmAnswerer(_runners(settings, request.parallel), settings, request.facts)


def start_vllm_decoder(request: EngineRequest, decoding: Decoding) -> DecodingRunner:
    """One engine of `parallel.tensor_parallel` devices that decodes with a draft, or without one.

    Raises UserError as `start_vllm`.
    """
    from eagle3lab.engines.vllm import VllmRunner

    _check_heads(request)
    return VllmRunner(replace(_settings(request, (), None), decoding=decoding))


def _settings(request: EngineRequest, layer_ids: tuple[int, ...], scratch: Path | None) -> VllmSettings:
    return VllmSettings(
        path=request.path,
        model_type=request.facts.model_type,
        layer_ids=layer_ids,
        dtype=str(request.dtype).removeprefix("torch."),
        device=request.device,
        max_len=request.max_len,
        batch_tokens=request.batch_tokens,
        scratch=scratch,
        eos_token_ids=request.facts.eos_token_ids,
        max_positions=request.facts.max_positions,
        tensor_parallel=request.parallel.tensor_parallel,
        memory_share=request.parallel.memory_share,
        eager=request.parallel.eager,
        cache_gib=request.parallel.cache_gib,
        trust_remote_code=request.model.trust_remote_code,
        architecture=request.facts.architecture,
    )


def _check_heads(request: EngineRequest) -> None:
    num_heads = request.facts.num_heads
    if num_heads % request.parallel.tensor_parallel:
        raise UserError(undivided_heads(num_heads, request.parallel))


def _runners(settings: VllmSettings, parallel: EngineConfig) -> list[EngineRunner]:
    from eagle3lab.engines.vllm import VllmRunner
    from eagle3lab.engines.vllm_capabilities import require_vllm

    require_vllm(settings.device)
    environments: list[dict[str, str]] = [{} for _ in range(parallel.data_parallel)]
    if settings.device == "cuda":
        groups = device_groups(
            os.environ.get("CUDA_VISIBLE_DEVICES"),
            torch.cuda.device_count(),
            parallel.tensor_parallel,
            parallel.data_parallel,
        )
        environments = [{"CUDA_VISIBLE_DEVICES": group} for group in groups]
    if parallel.data_parallel == 1:
        return [VllmRunner(settings)]
    runners: list[RemoteRunner] = []
    try:
        for environment in environments:
            runners.append(
                RemoteRunner(
                    VllmRunner,
                    settings,
                    environment,
                    start_seconds=settings.start_seconds,
                    answer_seconds=settings.answer_seconds,
                )
            )
        for runner in runners:
            runner.wait_ready()
    except BaseException:
        for runner in runners:
            runner.close()
        raise
    return list(runners)
