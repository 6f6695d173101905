"""What an engine is built for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from eagle3lab.config.schema import EngineConfig, ModelConfig
from eagle3lab.verifier.facts import VerifierFacts


@dataclass(frozen=True)
class EngineRequest:
    """A verifier, where it runs, and how long its sequences get.

    batch_tokens, parallel, scratch_dir: of vLLM alone; Hugging Face runs on one device and is given batches.
    """

    path: Path
    facts: VerifierFacts
    model: ModelConfig
    dtype: torch.dtype
    device: str  # "cuda", "cpu"
    max_len: int  # tokens of the longest sequence
    batch_tokens: int  # of one forward pass
    parallel: EngineConfig = field(default_factory=EngineConfig)
    layer_ids: Sequence[int] = ()  # those that `capture` will be asked for
    scratch_dir: Path | None = None  # where states are handed over
