"""One decoder layer of the draft over some rows, from its parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from . import elementwise as e
from .attention import Attention
from .weights import ALL, Matrix, Weight, split_first, stacked

Rotation = tuple[Tensor, Tensor]  # cosines and sines, each `[N, d]`


class Layer:
    """A layer's weights in the compute dtype, its step-0 keys and values, and the rows' own later ones.

    The first layer takes the embedding and the state side by side. Its projections of the embedding, by
    `qkv_embedding`, are made once for every position by the caller, who passes them as `extra`.

    A weight is cast where step 0 first needs it. Autograd runs what was recorded last first, so the weight's
    gradient is handed on as soon as its last product is done, and ranks sum it while the rest is computed.
    """

    def __init__(self, layer: nn.Module, *, first: bool, dtype: torch.dtype, compiled: bool) -> None:
        part: Any = layer
        attention, self.mlp = part.self_attn, part.mlp
        config: Any = attention.config
        self.dtype, self.compiled = dtype, compiled
        self.num_heads, self.num_kv = config.num_attention_heads, config.num_key_value_heads
        self.scale = attention.scaling
        self.eps = config.rms_norm_eps
        self.first = first
        self.normed_residual = bool(getattr(part, "norm_before_residual", False))
        self.input_weight = (part.hidden_norm if first else part.input_layernorm).weight
        self.post_weight = part.post_attention_layernorm.weight
        self.q_norm, self.k_norm = (
            module.weight if module is not None else None
            for module in (getattr(attention, "q_norm", None), getattr(attention, "k_norm", None))
        )
        self.projections = [attention.q_proj, attention.k_proj, attention.v_proj]
        self.embedding_norm = part.input_layernorm.weight if first else None
        self.qkv_bias = _bias(self.projections)
        q_size = attention.q_proj.weight.shape[0]
        self.q_part, self.kv_part = slice(0, q_size), slice(q_size, None)
        self.o_proj, self.o_bias = attention.o_proj, _bias([attention.o_proj])
        self.gate_up_bias = _bias([self.mlp.gate_proj, self.mlp.up_proj])
        self.down_bias = _bias([self.mlp.down_proj])
        self.keys: Sequence[Tensor] = ()  # of step 0; shape: [n_kv, C, d]
        self.own_keys: list[Tensor] = []  # of later steps; shape: [n_kv, R, d]
        self.own_values: list[Tensor] = []

    @cached_property
    def _split(self) -> tuple[Weight, Weight]:
        """Of a first layer: what is multiplied with the embedding, and what with the state."""
        assert self.embedding_norm is not None
        weights = [m.weight for m in self.projections]
        return split_first(self.embedding_norm, weights, len(self.embedding_norm), self.dtype)

    @cached_property
    def qkv_embedding(self) -> Weight:
        return self._split[0]

    @cached_property
    def qkv(self) -> Weight:
        return self._split[1] if self.first else stacked([m.weight for m in self.projections], self.dtype)

    @cached_property
    def o(self) -> Weight:
        return stacked([self.o_proj.weight], self.dtype)

    @cached_property
    def gate_up(self) -> Weight:
        return stacked([self.mlp.gate_proj.weight, self.mlp.up_proj.weight], self.dtype)

    @cached_property
    def down(self) -> Weight:
        return stacked([self.mlp.down_proj.weight], self.dtype)

    def enter(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """A first layer's input: the rounded norm of the state, and the residual. shape: [N, H]"""
        function = e.kernel(e.norm_and_residual, self.compiled)
        return function(x, self.input_weight, self.eps, self.normed_residual, self.dtype)

    def enter_keys(self, x: Tensor) -> Tensor:
        """The rounded norm alone. shape: [N, H]"""
        return e.kernel(e.norm, self.compiled)(x, self.input_weight, self.eps, self.dtype)

    def queries(self, x: Tensor, extra: Tensor | None, rotation: Rotation) -> Tensor:
        """shape: [N, H] -> [n, N, d]"""
        function = e.kernel(e.heads, self.compiled)
        product = self._product(x, self.q_part)
        return function(product, extra, *rotation, self.q_norm, self.eps, self.num_heads)

    def keys_and_values(self, x: Tensor, extra: Tensor | None, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """shape: [N, H] -> [n_kv, N, d] twice"""
        function = e.kernel(e.keys_and_values, self.compiled)
        product = self._product(x, self.kv_part)
        return function(product, extra, *rotation, self.k_norm, self.eps, self.num_kv)

    def queries_keys_values(
        self, x: Tensor, extra: Tensor | None, rotation: Rotation
    ) -> tuple[Tensor, Tensor, Tensor]:
        """All three of the same rows."""
        function = e.kernel(e.queries_keys_values, self.compiled)
        norms = self.q_norm, self.k_norm
        return function(self._product(x), extra, *rotation, *norms, self.eps, self.num_heads, self.num_kv)

    def _product(self, x: Tensor, part: slice = ALL) -> Tensor:
        return _plus(self.qkv(x, part), None if self.qkv_bias is None else self.qkv_bias[part])

    def attended(self, q: Tensor, attend: Attention) -> Tensor:
        """Attention of rows over step-0 keys and their own later ones. shape: [n, N, d] -> [N, n * d]"""
        keys, values = self.keys
        out, lse = attend(q, keys, values)
        if not self.own_keys:
            return e.by_row(out)
        merge = e.kernel(e.merged, self.compiled)
        return merge(out, lse[..., None], q, list(self.own_keys), list(self.own_values), self.scale)

    def rest(self, residual: Tensor, attended: Tensor) -> tuple[Tensor, Tensor]:
        """Output projection and MLP: the layer's output is the sum of the two results. shapes: [N, H]"""
        out = _plus(self.o(attended), self.o_bias)
        function = e.kernel(e.add_and_norm, self.compiled)
        total, x = function(residual, out, self.post_weight, self.eps, self.dtype)
        if self.gate_up_bias is None:
            return total, _Mlp.apply(
                x, self.gate_up.node, self.down.node, self.gate_up.matrix, self.down.matrix, self.compiled
            )
        gated = e.kernel(e.gated, self.compiled)(_plus(self.gate_up(x), self.gate_up_bias))
        return total, _plus(self.down(gated), self.down_bias)


def _bias(modules: Sequence[nn.Linear]) -> Tensor | None:
    biases = [m.bias for m in modules if m.bias is not None]
    assert len(biases) in (0, len(modules)), "some of the projections have a bias"
    return torch.cat(biases) if biases else None


def _plus(x: Tensor, bias: Tensor | None) -> Tensor:
    return x if bias is None else x + bias.to(x.dtype)


class _Mlp(Function):
    """`W_down (silu(W_gate x) * W_up x)`, keeping the products but not what lies between them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, _gate_up: Tensor, _down: Tensor, gate_up: Matrix, down: Matrix, compiled: bool
    ) -> Tensor:
        products = x @ gate_up.value.t()  # shape: [N, 2 * I]
        ctx.save_for_backward(x, products)
        ctx.gate_up, ctx.down, ctx.compiled = gate_up, down, compiled
        return e.kernel(e.gated, compiled)(products) @ down.value.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, products = ctx.saved_tensors
        backward = e.kernel(e.gated_backward, ctx.compiled)
        gated, grad_products = backward(products, grad @ ctx.down.value)
        ctx.down.add(grad, gated)
        ctx.gate_up.add(grad_products, x)
        return grad_products @ ctx.gate_up.value, None, None, None, None, None
