"""fp8 e4m3 with one fp32 scale per token and slot: half the bytes of bf16."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem

FP8 = torch.float8_e4m3fn
CHUNK_TOKENS = 64  # at a time: what lies between stays in the processor's cache
LARGEST = 448.0  # of e4m3; it has no infinity
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny


def quantize(states: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Scale every hidden-state vector so that its largest value becomes 448, and round it to e4m3.

    states: [T, n * hidden_size], finite. Returns values [T, n * hidden_size] and scales [T, n] float32.
    An element keeps 4 significant bits: its error is at most 1/16, about 2.5 % of a vector's norm.
    """
    num_tokens, num_slots = len(states), states.shape[1] // hidden_size
    values = torch.empty(states.shape, dtype=FP8)
    scales = torch.empty(num_tokens, num_slots)
    buffer = torch.empty(min(CHUNK_TOKENS, num_tokens), num_slots, hidden_size)
    for start in range(0, num_tokens, CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        slots = buffer[: len(scales[part])]
        slots.copy_(states[part].unflatten(-1, (-1, hidden_size)))
        largest = torch.maximum(slots.amax(-1), -slots.amin(-1))
        scales[part] = (largest / LARGEST).clamp_min_(_SMALLEST_SCALE)
        values[part].unflatten(-1, (-1, hidden_size)).copy_(slots.div_(scales[part].unsqueeze(-1)))
    return values, scales


def dequantize(values: Tensor, scales: Tensor, hidden_size: int) -> Tensor:
    """The states [T, n * hidden_size] in bfloat16 that `values` and `scales` stand for."""
    states = values.to(torch.bfloat16)  # exact: bf16 holds every e4m3 value
    # computed in fp32, since a scale is fp32, and rounded once; no fp32 copy of the states is made
    states.unflatten(-1, (-1, hidden_size)).mul_(scales.unsqueeze(-1))
    return states


def check_scales(scales: Tensor, where: str) -> None:
    """Raise IntegrityError unless every scale is a finite positive number."""
    if not scales.numel():
        return
    smallest, largest = torch.aminmax(scales)  # NaN is both, and neither comparison holds for it
    if not (smallest > 0 and largest < torch.inf):
        wrong = int((~(torch.isfinite(scales) & (scales > 0))).sum())
        raise IntegrityError(Problem(f"{where}: {wrong} scales are not finite and positive"))
