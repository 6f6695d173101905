"""The second opinion of the self-test: a plain transformers forward that shares nothing with the engines.

Aux layers come from `output_hidden_states=True` and logits from the model's own head. Only the state
before the final norm, which transformers does not return, is read at the input of that norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.engines.load import find_layers, load_causal_lm
from eagle3lab.verifier.facts import VerifierFacts


@dataclass(frozen=True)
class Reference:
    """Everything the verifier says about one row, in float32 on the CPU."""

    token_ids: tuple[int, ...]
    hidden: tuple[Tensor, ...]  # hidden_states[0..num_layers], each [T, hidden_size]; the last is post-norm
    pre_norm: Tensor  # shape: [T, hidden_size]
    logits: Tensor  # shape: [T, vocab_size]


def reference_forward(
    path: Path,
    facts: VerifierFacts,
    rows: Sequence[Sequence[int]],
    *,
    dtype: torch.dtype,
    device: str,
    trust_remote_code: bool = False,
) -> list[Reference]:
    """Load the verifier, run every row by itself, free the verifier."""
    model = load_causal_lm(
        path, num_layers=facts.num_layers, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    inner, _ = find_layers(model, facts.num_layers)
    references = [_run(model, inner.norm, row) for row in rows]
    del model, inner
    if device == "cuda":
        torch.cuda.empty_cache()
    return references


def _run(model: Any, norm: nn.Module, row: Sequence[int]) -> Reference:
    seen: list[Tensor] = []
    handle = norm.register_forward_pre_hook(lambda _module, args: seen.append(args[0].detach().clone()))
    try:
        with torch.no_grad():
            out = model(
                input_ids=torch.tensor([list(row)], dtype=torch.int64, device=model.device),
                output_hidden_states=True,
                use_cache=False,
            )
    finally:
        handle.remove()

    def plain(tensor: Tensor) -> Tensor:
        return tensor[0].float().cpu()

    return Reference(
        tuple(row), tuple(plain(h) for h in out.hidden_states), plain(seen[0]), plain(out.logits)
    )
