"""fp8 e4m3 with one fp32 scale per token and slot: half the bytes of bf16."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem

FP8 = torch.float8_e4m3fn
CHUNK_VALUES = 2**23  # rounded at a time; few calls, because each hands Python's lock over
LARGEST = 448.0  # of e4m3; it has no infinity
_SMALLEST_SCALE = torch.finfo(torch.float32).tiny
_THREAD = threading.local()


def quantize(states: Tensor, hidden_size: int) -> tuple[Tensor, Tensor]:
    """Scale every hidden-state vector so that its largest value becomes 448, and round it to e4m3.

    states: [T, n * hidden_size], finite. Returns values [T, n * hidden_size] and scales [T, n] float32.
    An element keeps 4 significant bits: its error is at most 1/16, about 2.5 % of a vector's norm.
    """
    num_tokens, width = states.shape
    values = torch.empty(num_tokens, width, dtype=FP8)
    scales = torch.empty(num_tokens, width // hidden_size)
    step = max(1, CHUNK_VALUES // width)
    for start in range(0, num_tokens, step):
        part = slice(start, start + step)
        slots = _scratch(scales[part].numel() * hidden_size).view(-1, width // hidden_size, hidden_size)
        slots.copy_(states[part].unflatten(-1, (-1, hidden_size)))
        largest = torch.maximum(slots.amax(-1), -slots.amin(-1))
        scales[part] = (largest / LARGEST).clamp_min_(_SMALLEST_SCALE)
        values[part].unflatten(-1, (-1, hidden_size)).copy_(slots.div_(scales[part].unsqueeze(-1)))
    return values, scales


def _scratch(size: int) -> Tensor:
    """`size` fp32 values that this thread uses again: fresh memory costs more than the arithmetic."""
    buffer: Tensor | None = getattr(_THREAD, "buffer", None)
    if buffer is None or buffer.numel() < size:
        buffer = _THREAD.buffer = torch.empty(size)
    return buffer[:size]


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
