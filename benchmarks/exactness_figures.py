"""Figures of `vllm_exactness.py`: relative errors by layer, their bounds and their table."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3lab.extract.alignment import relative_errors

Layers = dict[str, Tensor]  # layer id, or "last" -> [T, hidden_size] in fp32


def by_layer(aux: Tensor, last: Tensor, layer_ids: Sequence[int], hidden_size: int) -> Layers:
    """[T, n * hidden_size] and [T, hidden_size] under their names."""
    return dict(zip(map(str, layer_ids), aux.split(hidden_size, dim=-1), strict=True)) | {"last": last}


def compare(
    layer: str, got: Sequence[Layers], fp32: Sequence[Layers], same: Sequence[Layers]
) -> dict[str, float]:
    """vLLM against Hugging Face in fp32 and in vLLM's dtype, and Hugging Face's own distance from fp32."""

    def errors(a: Sequence[Layers], b: Sequence[Layers]) -> Tensor:
        return torch.cat([relative_errors(x[layer], y[layer]) for x, y in zip(a, b, strict=True)])

    ours = errors(got, fp32)
    return {
        "mean": float(ours.mean()),
        "p95": float(ours.quantile(0.95)),
        "max": float(ours.max()),
        "hf_mean": float(errors(same, fp32).mean()),
        "against_hf_mean": float(errors(got, same).mean()),
        "max_abs": max(float((x[layer] - y[layer]).abs().max()) for x, y in zip(got, fp32, strict=True)),
    }


def out_of_bounds(
    table: Sequence[dict[str, object]], agreement: dict[str, object], error: float, least: float
) -> list[str]:
    """What fails, in words; NaN fails."""
    wrong = [
        f"{row['capture']} layer {row['layer_id']}: {row[key]:.2e} > {error}"
        for row in table
        for key in ("mean", "store_against_hooks")
        if key in row and not float(row[key]) <= error  # type: ignore[arg-type]
    ]
    share = agreement["argmax_agreement"]
    return wrong + ([] if share >= least else [f"agreement {share} < {least}"])  # type: ignore[operator]


def as_table(table: Sequence[dict[str, object]]) -> str:
    """One line per layer."""
    keys = ("mean", "p95", "max", "hf_mean", "against_hf_mean", "store_against_hooks")
    lines = [f"{'capture':<8}{'layer':>6}" + "".join(f"{key:>21}" for key in keys)]
    for row in table:
        figures = "".join(f"{row[key]:>21.2e}" if key in row else " " * 21 for key in keys)
        lines.append(f"{row['capture']:<8}{row['layer_id']:>6}{figures}")
    return "\n".join(lines)
