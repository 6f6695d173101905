"""Logits, token losses and their gradient in chunks of rows, so that the logits of a step are never held."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from eagle3lab.config.schema import LossConfig, LossKind
from eagle3lab.draft.losses import TokenLoss, token_loss

from .elementwise import kernel, norm, scaled, wide
from .weights import Matrix, Weight

# Logits `[n, Vd]`, target logits `[T, Vd]`, each row's target `[n]`, weights `[n]` -> token losses fp32 `[n]`,
# weights * d losses / d logits, most probable tokens `[n]`. Without weights no gradient is made.
LossAndGradient = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor | None, Tensor]]

CHUNK_BYTES = 1 << 26  # of a chunk's logits: about what fits a GPU's cache with the targets' beside them
MIN_CHUNK_ROWS = 512  # fewer make slow matrix products
TARGET_BYTES = 1 << 31  # above it target logits are made again for every step


def loss_and_gradient(loss: LossConfig, *, compiled: bool) -> LossAndGradient:
    """The token loss of `losses.token_loss` with its gradient: written out for kl, else by autograd."""
    if loss.kind is LossKind.kl:
        return kl_with_gradient(compiled=compiled)
    return differentiated(token_loss(loss), compiled=compiled)


def differentiated(losses_of: TokenLoss, *, compiled: bool) -> LossAndGradient:
    """A token loss with its gradient by autograd, inside one chunk."""

    def gathered(logits: Tensor, targets: Tensor, index: Tensor) -> Tensor:
        return losses_of(logits[None], targets.index_select(0, index)[None])[0]

    function = kernel(gathered, compiled)

    def compute(
        logits: Tensor, targets: Tensor, index: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        guesses = logits.argmax(dim=-1)
        if weights is None:
            return function(logits, targets, index), None, guesses
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            losses = function(leaf, targets, index)
            (grad,) = torch.autograd.grad(losses, leaf, weights)
        return losses.detach(), grad, guesses

    return compute


def kl_with_gradient(*, compiled: bool) -> LossAndGradient:
    """Forward KL: losses sum_v p (log p - log q) and gradient q - p, in one kernel."""
    return kernel(_kl, compiled)


def _kl(
    logits: Tensor, targets: Tensor, index: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor]:
    log_q = wide(logits).log_softmax(dim=-1)
    log_p = wide(targets.index_select(0, index)).log_softmax(dim=-1)
    p = log_p.exp()
    losses = (p * torch.where(p > 0, log_p - log_q, 0.0)).sum(dim=-1)
    grad = None if weights is None else ((log_q.exp() - p) * weights[:, None]).to(logits.dtype)
    return losses, grad, logits.argmax(dim=-1)


class Targets:
    """The verifier's logits over the draft vocabulary at the positions a plan names, whole or made per chunk.

    states: `[R, H]`, the verifier's last states there, before its final norm.
    """

    def __init__(
        self, states: Tensor, norm_weight: Tensor, eps: float, head: Tensor, *, compiled: bool, max_bytes: int
    ) -> None:
        self.head = head
        self.normed = kernel(norm, compiled)(states, norm_weight, eps, head.dtype)
        size = states.shape[0] * head.shape[0] * head.element_size()
        self.logits = self.normed @ head.t() if size <= max_bytes else None
        rows = chunk_rows(head)
        self.tokens = torch.cat(
            [self._part(slice(start, start + rows)).argmax(-1) for start in range(0, states.shape[0], rows)]
        )  # shape: [R]; the verifier's choice

    def _part(self, part: slice) -> Tensor:
        return self.normed[part] @ self.head.t() if self.logits is None else self.logits[part]

    def at(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """Logits that hold the wanted rows, and their places in them. shape: [n] -> [T, Vd], [n]"""
        if self.logits is not None:
            return self.logits, index
        return self.normed.index_select(0, index) @ self.head.t(), torch.arange(
            len(index), device=index.device
        )


@dataclass(frozen=True)
class Head:
    """What turns normed states into losses. `weight` is None where the head is frozen."""

    matrix: Tensor  # shape: [Vd, H], compute dtype
    weight: Weight | None
    targets: Targets
    loss: LossAndGradient
    compiled: bool

    def scale(self, grad: Tensor, factor: Tensor, counted: Tensor) -> Tensor:
        """`grad * factor` in fp32 where counted, else 0."""
        return kernel(scaled, self.compiled)(grad, factor, counted)


def chunk_rows(head: Tensor) -> int:
    """Rows of a chunk: MIN_CHUNK_ROWS, or a multiple of it whose logits fit CHUNK_BYTES. head: `[Vd, H]`"""
    rows = CHUNK_BYTES // (head.shape[0] * head.element_size())
    return max(rows // MIN_CHUNK_ROWS, 1) * MIN_CHUNK_ROWS


@dataclass(frozen=True)
class StepLoss:
    """One TTT step's head: sums over its rows, and what it guessed."""

    weighted: Tensor  # shape: [], with graph; sum of weights * token losses
    plain: Tensor  # shape: []; sum of the token losses that count
    guesses: Tensor  # shape: [R]
    correct: Tensor  # shape: [R], bool


def step_loss(head: Head, states: Tensor, index: Tensor, counted: Tensor, weights: Tensor) -> StepLoss:
    """Losses of one step. states: `[R, H]` normed, fp32; index: `[R]` rows of the targets; counted: bool `[R]`.

    weights: fp32 `[R]`, 0 where not counted. A loss that is not counted reaches nothing, not even as NaN.
    """
    if torch.is_grad_enabled():
        node = states if head.weight is None else head.weight.node
        weighted, plain, guesses, correct = _StepLoss.apply(states, node, head, index, counted, weights)
    else:
        weighted, plain, guesses, correct, _ = _forward(states, head, index, counted, weights, None)
    return StepLoss(weighted, plain, guesses, correct)


def _forward(
    states: Tensor, head: Head, index: Tensor, counted: Tensor, weights: Tensor, grad: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Sums, guesses, and d weighted / d states written to `grad` where given."""
    losses, guesses = [], []
    rows = chunk_rows(head.matrix)
    for start in range(0, states.shape[0], rows):
        part = slice(start, start + rows)
        logits = states[part].to(head.matrix.dtype) @ head.matrix.t()  # shape: [n, Vd]
        wanted = weights[part] if grad is not None else None
        value, slope, tokens = head.loss(logits, *head.targets.at(index[part]), wanted)
        losses.append(value)
        guesses.append(tokens)
        if grad is not None:
            assert slope is not None
            torch.mm(slope, head.matrix, out=grad[part])
    every = torch.cat(losses)
    plain = torch.where(counted, every, 0)
    weighted = torch.where(counted, every * weights, 0).sum()
    guessed = torch.cat(guesses)
    return weighted, plain.sum(), guessed, guessed == head.targets.tokens[index], grad


class _StepLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, node: Tensor, head: Head, index: Tensor, counted: Tensor, weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.head = head
        grad = None
        if head.weight is None:
            grad = torch.empty(states.shape, dtype=head.matrix.dtype, device=states.device)
        weighted, plain, guesses, correct, grad = _forward(states, head, index, counted, weights, grad)
        if grad is None:
            ctx.save_for_backward(states, index, counted, weights)
        else:
            # a row that does not count may hold anything
            ctx.save_for_backward(grad, counted)
        ctx.mark_non_differentiable(plain, guesses, correct)
        return weighted, plain, guesses, correct

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, *_unused: Tensor) -> tuple[Tensor | None, ...]:
        head: Head = ctx.head
        if head.weight is None:
            grad, counted = ctx.saved_tensors
            return head.scale(grad, upstream, counted), None, None, None, None, None
        states, index, counted, weights = ctx.saved_tensors
        grad = torch.empty_like(states)
        matrix: Matrix = head.weight.matrix
        rows = chunk_rows(head.matrix)
        for start in range(0, states.shape[0], rows):
            part = slice(start, start + rows)
            x = states[part].to(head.matrix.dtype)
            logits = x @ head.matrix.t()
            _, slope, _ = head.loss(logits, *head.targets.at(index[part]), weights[part] * upstream)
            assert slope is not None
            slope = torch.where(counted[part, None], slope, 0)
            matrix.add(slope, x)
            grad[part] = slope @ head.matrix
        return grad, None, None, None, None, None
