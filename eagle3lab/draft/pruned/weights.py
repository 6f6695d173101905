"""Weights in the compute dtype, cast once per pack, and their gradients, summed in fp32 over all TTT steps.

A weight takes part in K matrix products. Autograd would round each of its K gradients to the compute dtype and
sum them there. Here the products add theirs to one fp32 sum, and the node that cast the weight hands it on.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from .elementwise import add_placed, kernel, placed

ALL = slice(None)


class Matrix:
    """One matrix `[out, in]` in the compute dtype and the sum of its gradient."""

    def __init__(self, value: Tensor, master_dtype: torch.dtype) -> None:
        self.value = value.detach()
        self.master_dtype = master_dtype
        self.total: Tensor | None = None

    def add(self, grad_out: Tensor, x: Tensor, rows: slice = ALL) -> None:
        """Add `grad_out^T x` to the gradient of the rows `rows`. shapes: [N, number of rows], [N, in]"""
        a = grad_out.t()
        in_fp32 = a.is_cuda and a.dtype is torch.bfloat16 and _fp32_products(a.device)
        if self.total is None and rows == ALL:
            self.total = torch.mm(a, x, out_dtype=torch.float32) if in_fp32 else (a @ x).to(self.master_dtype)
            return
        if self.total is None:
            self.total = torch.zeros_like(self.value, dtype=self.master_dtype)
        part = self.total[rows]
        if in_fp32:
            torch.addmm(part, a, x, out_dtype=torch.float32, out=part)
        else:
            part += a @ x

    def take(self) -> Tensor:
        """The gradient, once."""
        total, self.total = self.total, None
        return torch.zeros_like(self.value, dtype=self.master_dtype) if total is None else total


@functools.cache
def _fp32_products(device: torch.device) -> bool:
    """Whether matrix products of bf16 can be summed into an fp32 matrix in place."""
    a = torch.ones(16, 16, dtype=torch.bfloat16, device=device)
    total = torch.ones(16, 16, device=device)
    try:
        torch.addmm(total, a, a, out_dtype=torch.float32, out=total)
        return bool((total == 17).all() and (torch.mm(a, a, out_dtype=torch.float32) == 16).all())
    except (RuntimeError, TypeError):
        return False


class Weight:
    """A `Matrix` with the graph node that stands for it."""

    def __init__(self, matrix: Matrix, node: Tensor) -> None:
        self.matrix = matrix
        self.node = node

    def __call__(self, x: Tensor, rows: slice = ALL) -> Tensor:
        """`x W^T` in the compute dtype, for some rows of W. shapes: [N, in] -> [N, number of rows]"""
        return _Product.apply(x, self.node, self.matrix, rows)


def stacked(parameters: Sequence[Tensor], dtype: torch.dtype) -> Weight:
    """The parameters, one below the other, as one matrix."""
    keep: list[Matrix] = []
    node = _Stacked.apply(keep, dtype, *parameters)
    return Weight(keep[0], node)


def split_first(
    norm: Tensor, parameters: Sequence[Tensor], hidden_size: int, dtype: torch.dtype
) -> tuple[Weight, Weight]:
    """Projections `[out, 2 H]` of a first layer: those of the embedding, with its norm's weight in them, and of the state.

    With w the norm's weight and e the normalised embedding, `W (w e)` = `(W diag(w)) e`. So nothing needs to
    be differentiated through e to get the gradient of w.
    """
    keep: list[Matrix] = []
    nodes = _SplitFirst.apply(keep, dtype, hidden_size, norm, *parameters)
    return Weight(keep[0], nodes[0]), Weight(keep[1], nodes[1])


class _Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _node: Tensor, matrix: Matrix, rows: slice) -> Tensor:
        ctx.save_for_backward(x)
        ctx.matrix, ctx.rows = matrix, rows
        return x @ matrix.value[rows].t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None, None]:
        (x,) = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            ctx.matrix.add(grad, x, ctx.rows)
        grad_x = grad @ ctx.matrix.value[ctx.rows] if ctx.needs_input_grad[0] else None
        return grad_x, None, None, None


def _empty(parameters: Sequence[Tensor], width: int, dtype: torch.dtype) -> Tensor:
    rows = sum(p.shape[0] for p in parameters)
    return torch.empty(rows, width, dtype=dtype, device=parameters[0].device)


class _Stacked(Function):
    @staticmethod
    def forward(ctx: Any, keep: list[Matrix], dtype: torch.dtype, *parameters: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        value = _empty(parameters, parameters[0].shape[1], dtype)
        for part, parameter in zip(value.split([len(p) for p in parameters]), parameters, strict=True):
            part.copy_(parameter)  # casts on the way
        ctx.matrix = Matrix(value, parameters[0].dtype)
        ctx.rows = [p.shape[0] for p in parameters]
        keep.append(ctx.matrix)
        return value

    @staticmethod
    def backward(ctx: Any, _grad: None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.matrix.take().split(ctx.rows)


class _SplitFirst(Function):
    @staticmethod
    def forward(
        ctx: Any, keep: list[Matrix], dtype: torch.dtype, hidden_size: int, norm: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        embedding, state = (_empty(parameters, hidden_size, dtype) for _ in range(2))
        rows = [len(p) for p in parameters]
        for e, s, p in zip(embedding.split(rows), state.split(rows), parameters, strict=True):
            torch.mul(p[:, :hidden_size], norm, out=e)
            s.copy_(p[:, hidden_size:])
        ctx.matrices = [Matrix(embedding, norm.dtype), Matrix(state, norm.dtype)]
        ctx.rows = [p.shape[0] for p in parameters]
        ctx.hidden_size = hidden_size
        ctx.save_for_backward(norm, *parameters)
        keep += ctx.matrices
        return embedding, state

    @staticmethod
    def backward(ctx: Any, *_grads: None) -> tuple[Tensor | None, ...]:
        norm, *parameters = ctx.saved_tensors
        totals = [matrix.take().split(ctx.rows) for matrix in ctx.matrices]
        grad_norm = torch.zeros_like(norm)
        grads = []
        for parameter, embedding, state in zip(parameters, *totals, strict=True):
            grad_norm += (parameter[:, : ctx.hidden_size] * embedding).sum(dim=0)
            grad = torch.empty_like(parameter)
            torch.mul(embedding, norm, out=grad[:, : ctx.hidden_size])
            grad[:, ctx.hidden_size :] = state
            grads.append(grad)
        return None, None, None, grad_norm, *grads


class Rows:
    """Rows `[N, out]` made once by one product and used in many gathers, whose gradients are summed in fp32."""

    def __init__(self, x: Tensor, weight: Weight, *, compiled: bool) -> None:
        self._sum = _RowSum((x.shape[0], weight.matrix.value.shape[0]), compiled)
        self._node = _OnceProduct.apply(x, weight.node, weight.matrix, self._sum)

    def gather(self, index: Tensor, places: Tensor, columns: slice = ALL) -> Tensor:
        """Rows by number, or some columns of them. shape: [n] -> [n, number of columns]

        places: `[N]`, where `index` names a row, or -1; a row whose place is not named gets no gradient.
        """
        return _Gather.apply(self._node, index, places, self._sum, columns)


class _RowSum:
    """The gradient of `Rows`."""

    def __init__(self, shape: tuple[int, int], compiled: bool) -> None:
        self.shape = shape
        self.compiled = compiled
        self.total: Tensor | None = None

    def add(self, grad: Tensor, places: Tensor, columns: slice) -> None:
        if self.total is None and columns == ALL:
            self.total = kernel(placed, self.compiled)(grad, places)
            return
        if self.total is None:
            dtype = torch.promote_types(grad.dtype, torch.float32)
            self.total = torch.zeros(self.shape, dtype=dtype, device=grad.device)
        kernel(add_placed, self.compiled)(self.total[:, columns], grad, places)


class _OnceProduct(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, _node: Tensor, matrix: Matrix, row_sum: _RowSum) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        ctx.matrix, ctx.row_sum = matrix, row_sum
        return x @ matrix.value.t()

    @staticmethod
    def backward(ctx: Any, _grad: None) -> tuple[None, None, None, None]:
        (x,) = ctx.saved_tensors
        total, ctx.row_sum.total = ctx.row_sum.total, None
        if total is not None:
            ctx.matrix.add(total.to(x.dtype), x)
        return None, None, None, None


class _Gather(Function):
    @staticmethod
    def forward(
        ctx: Any, node: Tensor, index: Tensor, places: Tensor, row_sum: _RowSum, columns: slice
    ) -> Tensor:
        ctx.save_for_backward(places)
        ctx.row_sum, ctx.columns = row_sum, columns
        return node[:, columns].index_select(0, index)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        (places,) = ctx.saved_tensors
        ctx.row_sum.add(grad, places, ctx.columns)
        return None, None, None, None, None
