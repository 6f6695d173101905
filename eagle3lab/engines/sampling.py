"""Drawing one token from logits, with a generator that belongs to one request alone."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from eagle3lab.engines.base import Sampling


def draw(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    """The next token id. `generator` lives on the CPU and is used once per draw.

    logits: shape [vocab_size]. Temperature first, then the `top_k` likeliest, then the smallest set of
    likeliest tokens whose probabilities reach `top_p` (nucleus sampling, Holtzman et al. 2020).
    """
    if sampling.temperature == 0:
        return int(logits.argmax())
    scores, order = torch.sort(logits.float().cpu() / sampling.temperature, descending=True, stable=True)
    if sampling.top_k:
        scores = scores[: sampling.top_k]
    probabilities = torch.softmax(scores, dim=-1)
    before = probabilities.cumsum(0) - probabilities  # of all likelier tokens
    if sampling.top_p < 1:
        probabilities = probabilities.where(before < sampling.top_p, torch.zeros(()))
    return int(order[int(torch.multinomial(probabilities, 1, generator=generator))])


def hashed_seed(*parts: object) -> int:
    """The seed of one request, of 63 bits: a hash of what makes it this one."""
    digest = hashlib.sha256("\n".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
