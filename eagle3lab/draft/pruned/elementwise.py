"""Everything between the matrix products, as small functions that are compiled into one kernel each.

The residual stream is fp32 and only operands of products are rounded to the compute dtype: so the reference
has it under autocast, because its embedding is fp32. `dtype` is the compute dtype throughout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch._dynamo
from torch import Tensor, nn
from torch.nn.functional import silu

F = TypeVar("F", bound=Callable[..., object])

# Dynamo's own limit of 8 falls back to the interpreter without a word; lengths of packs need more.
COMPILED_SHAPES = 64


def kernel(function: F, compiled: bool) -> F:
    """`function`, compiled if asked for: once for every number of rows, and again for other widths."""
    return _compiled(function) if compiled else function


@functools.cache
def _compiled(function: F) -> F:
    allow_shapes()
    inner: Any = torch.compile(function)

    def call(*arguments: Any) -> Any:
        for argument in arguments:
            for tensor in argument if isinstance(argument, list) else (argument,):
                _mark_rows(tensor)
        return inner(*arguments)

    return call  # type: ignore[return-value]


def _mark_rows(tensor: Any) -> None:
    """Rows are the first dimension of activations `[N, ...]` and the second of those by head, `[n, N, d]`."""
    if isinstance(tensor, Tensor) and tensor.ndim and not isinstance(tensor, nn.Parameter):
        torch._dynamo.maybe_mark_dynamic(tensor, int(tensor.ndim == 3))


def allow_shapes() -> None:
    """Let Dynamo compile a function for more lengths than its own limit."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, COMPILED_SHAPES)


def wide(x: Tensor) -> Tensor:
    """fp32, or what is wider already."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """RMSNorm over the last dimension, in fp32."""
    v = wide(x)
    v = v * torch.rsqrt(v.pow(2).mean(-1, keepdim=True) + eps)
    return v if weight is None else weight * v


def embedded(embedding: Tensor, ids: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Embeddings under RMSNorm without weight. shapes: [V, H], [N] -> [N, H]"""
    return rms(embedding.index_select(0, ids), None, eps).to(dtype)


def norm(x: Tensor, weight: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm, rounded. shape: [N, H]"""
    return rms(x, weight, eps).to(dtype)


def norm_parts(x: Tensor, weights: Sequence[Tensor], eps: float, dtype: torch.dtype) -> Tensor:
    """RMSNorm of each of the equal parts of a row, rounded. shape: [N, len(weights) * H]"""
    parts = x.chunk(len(weights), dim=-1)
    return torch.cat([rms(p, w, eps).to(dtype) for p, w in zip(parts, weights, strict=True)], dim=-1)


def norm_and_residual(
    x: Tensor, weight: Tensor, eps: float, normed: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The rounded norm, and the residual in fp32: the norm unrounded, or `x`. shape: [N, H]"""
    y = rms(x, weight, eps)
    return y.to(dtype), y if normed else wide(x)


def add_and_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`x + y` in fp32 and its rounded norm. shape: [N, H]"""
    total = x + y
    return total, rms(total, weight, eps).to(dtype)


def last_norm(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`x + y` and its norm, both in fp32. shape: [N, H]"""
    total = x + y
    return total, rms(total, weight, eps)


def last_norm_and_next_input(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    input_weight: Tensor,
    eps: float,
    feed_norm: bool,
    normed: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of `last_norm` with what `norm_and_residual` makes of the next step's state.

    That state is `x + y`, or its norm with `feed_norm`.
    """
    total, last = last_norm(x, y, weight, eps)
    return last, *norm_and_residual(last if feed_norm else total, input_weight, eps, normed, dtype)


def gated(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up`. shape: [N, 2 * I] -> [N, I]"""
    gate, up = gate_up.chunk(2, dim=-1)
    return (silu(wide(gate)) * wide(up)).to(gate_up.dtype)


def gated_backward(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The value again, and the gradient of `gate_up`. shapes: [N, 2 * I], [N, I] -> [N, I], [N, 2 * I]"""
    gate, up = (wide(part) for part in gate_up.chunk(2, dim=-1))
    g, sigmoid = wide(grad), gate.sigmoid()
    active = gate * sigmoid
    grad_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    grads = torch.cat([grad_gate, g * active], dim=-1)
    return (active * up).to(gate_up.dtype), grads.to(gate_up.dtype)


def heads(
    x: Tensor,
    extra: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    num_heads: int,
) -> Tensor:
    """Queries or keys by head, normed if a weight is given, rotated. shapes: [N, n * d], [N, d] -> [n, N, d]

    `extra` is added before: the part of the projection that the embedding gives.
    """
    v = wide(x) if extra is None else wide(x) + wide(extra)
    v = v.view(x.shape[0], num_heads, -1).transpose(0, 1)
    if norm_weight is not None:
        v = rms(v, norm_weight, eps)
    a, b = v.chunk(2, dim=-1)
    return (v * cos + torch.cat((-b, a), dim=-1) * sin).to(x.dtype)


def keys_and_values(
    x: Tensor,
    extra: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    norm_weight: Tensor | None,
    eps: float,
    num_heads: int,
) -> tuple[Tensor, Tensor]:
    """Keys as `heads` makes them, and values beside them. shapes: [N, 2 * n * d] -> [n, N, d] twice"""
    k, v = x.chunk(2, dim=-1)
    k_extra, v_extra = (None, None) if extra is None else extra.chunk(2, dim=-1)
    value = wide(v) if v_extra is None else wide(v) + wide(v_extra)
    value = value.view(x.shape[0], num_heads, -1).transpose(0, 1)
    return heads(k, k_extra, cos, sin, norm_weight, eps, num_heads), value.to(x.dtype).contiguous()


def queries_keys_values(
    x: Tensor,
    extra: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    num_heads: int,
    num_kv: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values side by side, as `heads` and `keys_and_values` make them."""
    sizes = _sizes(x, num_heads, num_kv)
    q, kv = x.split(sizes, dim=-1)
    q_extra, kv_extra = (None, None) if extra is None else extra.split(sizes, dim=-1)
    query = heads(q, q_extra, cos, sin, q_norm, eps, num_heads)
    return query, *keys_and_values(kv, kv_extra, cos, sin, k_norm, eps, num_kv)


def _sizes(x: Tensor, num_heads: int, num_kv: int) -> list[int]:
    head_dim = x.shape[1] // (num_heads + 2 * num_kv)
    return [num_heads * head_dim, 2 * num_kv * head_dim]


def scaled(x: Tensor, factor: Tensor, kept: Tensor) -> Tensor:
    """`x * factor` in fp32 where `kept`, else 0. shapes: [N, H], [], bool [N] -> [N, H]"""
    return torch.where(kept[:, None], wide(x) * factor, 0.0)


def placed(x: Tensor, places: Tensor) -> Tensor:
    """Row `places[i]` of `x` in row i, in fp32; 0 where that is -1. shapes: [n, W], [N] -> [N, W]"""
    return torch.where(places[:, None] >= 0, wide(x.index_select(0, places.clamp(min=0))), 0.0)


def add_placed(total: Tensor, x: Tensor, places: Tensor) -> None:
    """Add `placed` to `total`, in place. shape: [N, W]"""
    total.add_(placed(x, places))


def by_row(out: Tensor) -> Tensor:
    """shape: [n, N, d] -> [N, n * d]"""
    return out.transpose(0, 1).reshape(out.shape[1], -1)


def merged(
    out: Tensor, lse: Tensor, q: Tensor, own_keys: list[Tensor], own_values: list[Tensor], scale: float
) -> Tensor:
    """Attention over step-0 keys together with each row's own later keys.

    out: `[n, R, d]` over step-0 keys and lse: `[n, R, 1]` its log-sum-exp; q: `[n, R, d]`; own_keys, own_values:
    `[n_kv, R, d]` per later step. A softmax over the union is the sum of the parts, each weighted by its share
    of the total exponentials. Returns `[R, n * d]`.
    """
    groups = q.shape[0] // own_keys[0].shape[0]

    def all_heads(x: Tensor) -> Tensor:
        return wide(x).repeat_interleave(groups, dim=0)

    scores = [(wide(q) * all_heads(k)).sum(-1) * scale for k in own_keys]
    before = wide(lse).squeeze(-1)
    total = torch.logsumexp(torch.stack([before, *scores]), dim=0)
    result = wide(out) * (before - total).exp()[..., None]
    for score, value in zip(scores, own_values, strict=True):
        result = result + (score - total).exp()[..., None] * all_heads(value)
    return by_row(result.to(out.dtype))
