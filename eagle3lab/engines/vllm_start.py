"""From a configuration to a running vLLM backend: settings, scratch directory, one runner or several."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

import torch

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import EngineConfig, ModelConfig
from eagle3lab.engines.replicas import RemoteRunner, device_groups
from eagle3lab.engines.vllm_engine import EngineRunner, VllmEngine
from eagle3lab.engines.vllm_files import Scratch
from eagle3lab.engines.vllm_settings import VllmSettings
from eagle3lab.verifier.facts import VerifierFacts


def is_installed() -> bool:
    """Whether there is a vllm to import; it is not imported."""
    return importlib.util.find_spec("vllm") is not None


def start_vllm(
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
) -> VllmEngine:
    """Load the verifier into `parallel.data_parallel` engines of `parallel.tensor_parallel` devices each.

    layer_ids: those that `capture` will be asked for; the last state is always captured.
    max_len: tokens of the longest sequence that will be asked for.
    Raises:
        UserError: vllm is missing, too old or cannot run this verifier; too few devices; no scratch directory.
    """
    if facts.num_heads % parallel.tensor_parallel:
        raise UserError(
            Problem(
                f"{facts.num_heads} attention heads cannot be split over hardware.engine.tensor_parallel",
                parallel.tensor_parallel,
                f"a divisor of {facts.num_heads}",
                "hardware.engine.tensor_parallel=1 hardware.engine.data_parallel=N",
            )
        )
    scratch = Scratch(scratch_dir)
    settings = VllmSettings(
        path=path,
        model_type=facts.model_type,
        layer_ids=tuple(sorted({*layer_ids, facts.num_layers})),
        dtype=str(dtype).removeprefix("torch."),
        device=device,
        max_len=max_len,
        batch_tokens=batch_tokens,
        scratch=scratch.path,
        eos_token_ids=facts.eos_token_ids,
        max_positions=facts.max_positions,
        tensor_parallel=parallel.tensor_parallel,
        memory_share=parallel.memory_share,
        trust_remote_code=model.trust_remote_code,
    )
    try:
        return VllmEngine(_runners(settings, parallel), settings, facts, scratch)
    except BaseException:
        scratch.close()
        raise


def _runners(settings: VllmSettings, parallel: EngineConfig) -> list[EngineRunner]:
    from eagle3lab.engines.vllm import VllmRunner, require_vllm

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
