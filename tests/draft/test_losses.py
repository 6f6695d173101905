"""Token losses and their gradients against formulas written out in Python's own floats, token by token."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.schema import LossConfig, LossKind
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.speculators_model import speculators_loss

KINDS = [kind for kind in LossKind if kind is not LossKind.sum]
INF = math.inf


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    log_sum = math.log(math.fsum(math.exp(x - top) for x in row))
    return [x - top - log_sum for x in row]


def by_hand(
    kind: LossKind, row: list[float], target: list[float], eta: float = 3.0
) -> tuple[float, list[float]]:
    """Value and gradient with respect to the draft's logits of one token, in fp64."""
    log_q, log_p = log_softmax(row), log_softmax(target)
    q, p = [math.exp(x) for x in log_q], [math.exp(x) for x in log_p]
    tokens = range(len(row))
    if kind is LossKind.kl:
        value = math.fsum(p[v] * (log_p[v] - log_q[v]) for v in tokens if p[v])
        return value, [q[v] - p[v] for v in tokens]
    if kind is LossKind.reverse_kl:
        value = math.fsum(q[v] * (log_q[v] - log_p[v]) for v in tokens if q[v])
        return value, [q[v] * (log_q[v] - log_p[v] - value) if q[v] else 0.0 for v in tokens]
    if kind is LossKind.js:
        middle = [(p[v] + q[v]) / 2 for v in tokens]
        from_p = math.fsum(p[v] * math.log(p[v] / middle[v]) for v in tokens if p[v])
        from_q = math.fsum(q[v] * math.log(q[v] / middle[v]) for v in tokens if q[v])
        slopes = [q[v] * (math.log(q[v] / middle[v]) - from_q) / 2 if q[v] else 0.0 for v in tokens]
        return (from_p + from_q) / 2, slopes
    if kind is LossKind.ce:
        label = target.index(max(target))
        return -log_q[label], [q[v] - (v == label) for v in tokens]
    if kind is LossKind.tv:
        value = 1.0 - math.fsum(min(p[v], q[v]) for v in tokens)
        above = [math.copysign(0.5, q[v] - p[v]) if q[v] != p[v] else 0.0 for v in tokens]
        mean = math.fsum(q[v] * above[v] for v in tokens)
        return value, [q[v] * (above[v] - mean) for v in tokens]
    assert kind is LossKind.lk
    (of_kl, slope_kl), (of_tv, slope_tv) = (
        by_hand(LossKind.kl, row, target),
        by_hand(LossKind.tv, row, target),
    )
    weight = math.exp(-eta * (1.0 - of_tv))
    slopes = [weight * a + (1.0 - weight) * b for a, b in zip(slope_kl, slope_tv, strict=True)]
    return weight * of_kl + (1.0 - weight) * of_tv, slopes


def normal(scale: float, seed: int, size: int = 40) -> list[float]:
    return (torch.randn(size, generator=torch.Generator().manual_seed(seed)) * scale).tolist()


# name: draft logits, verifier logits
CASES: dict[str, tuple[list[float], list[float]]] = {
    "usual": (normal(1.5, 0), normal(1.5, 1)),
    "sharp": (normal(8.0, 2), normal(8.0, 3)),
    "sharp verifier": (normal(0.5, 4), normal(12.0, 5)),
    "nearly equal": (normal(2.0, 6), [x + 1e-3 * (i % 3) for i, x in enumerate(normal(2.0, 6))]),
    "equal": (normal(2.0, 7), normal(2.0, 7)),
    "shifted by a constant": ([x + 100.0 for x in normal(2.0, 8)], normal(2.0, 18)),
    "all tied": ([0.0] * 40, [3.0] * 40),
    "largest tied": ([0.5, 1.0, 0.0, 2.0], [2.0, 7.0, 7.0, 1.0]),
    "barely ahead": ([0.5, 1.0, 0.0], [0.0, 1e-9, -1.0]),  # equal after an fp32 log-softmax
    "agreed at 1e4": ([1e4, -1e4, 0.0, 1.0], [1e4, -1e4, 0.0, 5.0]),
    "opposed at 1e4": ([1e4, -1e4, 0.0, 1.0], [-1e4, 1e4, 0.0, 5.0]),
    "verifier at 1e4": (normal(1.0, 9, 4), [1e4, -1e4, 0.0, 1.0]),
    "two tokens": ([0.3, -0.2], [-1.0, 0.4]),
    "masked in both": ([0.3, -INF, -0.2, 1.0], [-1.0, -INF, 0.4, 0.0]),
}


def run(loss: LossConfig, row: list[float], target: list[float]) -> tuple[Tensor, Tensor]:
    logits = torch.tensor([[row]], requires_grad=True)
    value = token_loss(loss)(logits, torch.tensor([[target]]))
    (gradient,) = torch.autograd.grad(value.sum(), logits)
    return value[0, 0], gradient[0, 0]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_follow_the_formula(kind: LossKind, case: str) -> None:
    row, target = (torch.tensor(x).tolist() for x in CASES[case])  # what fp32 holds of them
    value, gradient = by_hand(kind, row, target)
    found, slope = run(LossConfig(kind), row, target)
    assert found.item() == pytest.approx(value, rel=1e-5, abs=1e-6)
    assert slope.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_the_verifier_never_says_is_no_trouble(kind: LossKind) -> None:
    row, target = [0.3, 1.0, -0.2], [-1.0, -INF, 0.4]
    found, slope = run(LossConfig(kind), row, target)
    if kind is LossKind.reverse_kl:  # q (log q - log 0) is infinite
        assert found.item() == INF
        return
    value, gradient = by_hand(kind, row, target)
    assert found.item() == pytest.approx(value, rel=1e-5)
    assert slope.tolist() == pytest.approx(gradient, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_token_the_draft_can_never_say_is_infinite_or_finite_never_nan(kind: LossKind) -> None:
    found, slope = run(LossConfig(kind), [0.3, -INF, -0.2], [-1.0, 2.0, 0.4])
    infinite = kind in (LossKind.kl, LossKind.ce, LossKind.lk)
    assert found.item() == INF if infinite else math.isfinite(found.item())
    assert bool(slope.isfinite().all())


def test_a_sum_adds_its_terms_by_their_weights() -> None:
    loss = LossConfig(LossKind.sum, {"lk": 2.0, "ce": 0.5, "kl": 1.0}, lk_eta=1.5)
    row, target = CASES["usual"]
    terms = [
        (2.0, by_hand(LossKind.lk, row, target, eta=1.5)),
        (0.5, by_hand(LossKind.ce, row, target)),
        (1.0, by_hand(LossKind.kl, row, target)),
    ]
    found, slope = run(loss, row, target)
    assert found.item() == pytest.approx(sum(w * value for w, (value, _) in terms), rel=1e-5)
    wanted = [sum(w * gradient[v] for w, (_, gradient) in terms) for v in range(len(row))]
    assert slope.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_hybrid_lk_goes_from_kl_to_total_variation_with_eta() -> None:
    row, target = CASES["usual"]
    kl, tv = (run(LossConfig(kind), row, target)[0].item() for kind in (LossKind.kl, LossKind.tv))
    assert run(LossConfig(LossKind.lk, lk_eta=0.0), row, target)[0].item() == pytest.approx(kl)
    assert run(LossConfig(LossKind.lk, lk_eta=1e4), row, target)[0].item() == pytest.approx(tv)


def pair(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(3)
    return tuple((torch.randn(*shape, generator=g) * scale).to(dtype) for _ in range(2))  # type: ignore[return-value]


LOSSES: list[Any] = [
    *(pytest.param(LossConfig(kind), id=kind.value) for kind in KINDS),
    pytest.param(LossConfig(LossKind.lk, lk_eta=0.7), id="lk, eta 0.7"),
    pytest.param(LossConfig(LossKind.sum, {"kl": 0.5, "tv": 0.25, "lk": 2.0}, lk_eta=5.0), id="sum"),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_values_and_gradients_equal_those_of_speculators(loss: LossConfig) -> None:
    results = []
    for function in (token_loss(loss), speculators_loss(loss, "eager")):
        logits, targets = pair(1, 9, 300)
        value = function(logits.requires_grad_(), targets)
        (gradient,) = torch.autograd.grad((value * torch.arange(1.0, 10.0)).sum(), logits)
        results.append((value.detach(), gradient))
    (ours, slope), (theirs, their_slope) = results
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    assert float((slope - their_slope).norm() / their_slope.norm()) < 1e-5


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_raised_to_fp32_first(loss: LossConfig, dtype: torch.dtype) -> None:
    logits, targets = pair(2, 3, 50, dtype=dtype)
    value = token_loss(loss)(logits, targets)
    assert value.dtype == torch.float32
    assert torch.equal(value, token_loss(loss)(logits.float(), targets.float()))


@pytest.mark.parametrize("loss", LOSSES)
def test_any_chunk_of_tokens_gives_the_same_and_compiles_as_one_graph(loss: LossConfig) -> None:
    logits, targets = pair(6, 50)
    function = token_loss(loss)
    whole = function(logits, targets)
    assert whole.shape == (6,)
    chunks = torch.cat([function(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2, 4)])
    torch.testing.assert_close(chunks, whole, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(function(logits.view(2, 3, 50), targets.view(2, 3, 50)), whole.view(2, 3))
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(logits, targets), whole)


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_is_differentiated_through_the_verifier(loss: LossConfig) -> None:
    logits, targets = (x.requires_grad_() for x in pair(4, 20))
    token_loss(loss)(logits, targets).sum().backward()
    assert logits.grad is not None
    assert targets.grad is None
