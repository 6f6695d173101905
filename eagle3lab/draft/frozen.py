"""Frozen weights held as small as they are exact: a bf16 verifier's embedding and heads in bf16, equal heads once."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


@torch.no_grad()
def shrink_frozen(model: nn.Module, dtype: torch.dtype) -> int:
    """Hold frozen weights of an `Eagle3DraftModel` in `dtype` where that changes no value; returns bytes saved.

    A frozen draft head that equals the verifier's becomes the same parameter. What is trained stays as it is. A
    computation in `dtype` reads the same numbers as before; an export widens them again.
    """
    draft: Any = model
    before = _bytes(model)
    for parameter in model.parameters():
        if parameter.requires_grad or not parameter.is_floating_point():
            continue
        small = parameter.data.to(dtype)
        if torch.equal(small.to(parameter.dtype), parameter.data):
            parameter.data = small
    heads = draft.lm_head.weight, draft.verifier_lm_head.weight
    if not any(head.requires_grad for head in heads) and torch.equal(*heads):
        draft.verifier_lm_head.weight = draft.lm_head.weight
    return before - _bytes(model)


@torch.no_grad()
def widen_frozen(model: nn.Module) -> None:
    """Give every weight the dtype of the trained ones, as an export and a forward without autocast need it."""
    draft: Any = model
    for parameter in model.parameters():
        parameter.data = parameter.data.to(draft.fc.weight.dtype)


def _bytes(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())
