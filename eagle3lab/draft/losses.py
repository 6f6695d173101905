"""Token losses: how far the draft's distribution q of one token is from the verifier's p.

Both are softmax over the draft vocabulary, in fp32 whatever the logits are. Every loss is a pure function of
logits without control flow that depends on data, so it can be applied to any chunk and compiled.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from eagle3lab.config.schema import LossConfig, LossKind

# Logits and target logits `[..., Vd]` -> fp32 `[...]`.
TokenLoss = Callable[[Tensor, Tensor], Tensor]


def token_loss(loss: LossConfig) -> TokenLoss:
    """The loss of `loss.kind`, or the sum `loss.weights` of several, as one function of logits.

    It maps draft logits and verifier logits `[..., Vd]` of any float type to fp32 `[...]`. Nothing is
    differentiated through the verifier's logits. A logit of -inf is a probability of 0; what is infinite by
    its formula (a kl where q is 0 and p is not) is infinite, never NaN.
    """
    terms, eta = loss.terms(), loss.lk_eta

    def compute(logits: Tensor, targets: Tensor) -> Tensor:
        targets = targets.detach()
        log_q = logits.float().log_softmax(dim=-1)
        log_p = targets.float().log_softmax(dim=-1)
        total: Tensor | None = None
        for kind, weight in terms:
            if kind is LossKind.ce:
                # of the logits themselves: rounding of the log-softmax may make the two largest equal
                value = cross_entropy(log_q, targets.argmax(dim=-1))
            elif kind is LossKind.lk:
                value = lk(log_q, log_p, eta)
            else:
                value = _DIVERGENCES[kind](log_q, log_p)
            value = value if weight == 1.0 else weight * value
            total = value if total is None else total + value
        assert total is not None, "a loss has at least one term"
        return total

    return compute


def kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Forward KL: sum_v p (log p - log q). shapes: [..., Vd] -> [...]"""
    return _mean(log_p.exp(), log_p, log_q)


def reverse_kl(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Reverse KL: sum_v q (log q - log p). shapes: [..., Vd] -> [...]"""
    return _mean(log_q.exp(), log_q, log_p)


def js(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Jensen-Shannon: KL(p || m) / 2 + KL(q || m) / 2 with m = (p + q) / 2; at most log 2.

    With d = log p - log q: log(p / m) = log 2 + log sigmoid(d) and log(q / m) = log 2 + log sigmoid(-d).
    Source: Lin 1991. shapes: [..., Vd] -> [...]
    """
    p, q = log_p.exp(), log_q.exp()
    d = torch.where((p > 0) | (q > 0), log_p - log_q, 0.0)
    from_p = torch.where(p > 0, math.log(2.0) + logsigmoid(d), 0.0)
    from_q = torch.where(q > 0, math.log(2.0) + logsigmoid(-d), 0.0)
    return 0.5 * (p * from_p + q * from_q).sum(dim=-1)


def tv(log_q: Tensor, log_p: Tensor) -> Tensor:
    """Total variation: sum_v |p - q| / 2 = 1 - sum_v min(p, q), one minus the acceptance probability.

    Source: Leviathan et al. 2023 (arXiv 2211.17192), theorem 3.5. shapes: [..., Vd] -> [...]
    """
    return 0.5 * (log_p.exp() - log_q.exp()).abs().sum(dim=-1)


def lk(log_q: Tensor, log_p: Tensor, eta: float) -> Tensor:
    """Hybrid LK loss: w kl + (1 - w) tv with w = exp(-eta a), a = 1 - tv the acceptance probability.

    No gradient flows through w. A draft that is seldom accepted learns from kl, whose gradient is strong
    there; the better it is, the more it learns from tv, which is the acceptance itself. w belongs to each
    token, as in speculators 0.9 (`lk_hybrid_loss`, eta 3).
    Source: Samarin et al., "LK Losses" (arXiv 2602.23881). shapes: [..., Vd] -> [...]
    """
    distance = tv(log_q, log_p)
    weight = torch.exp(-eta * (1.0 - distance.detach()))
    return weight * kl(log_q, log_p) + (1.0 - weight) * distance


def cross_entropy(log_q: Tensor, label: Tensor) -> Tensor:
    """-log q of the verifier's most probable token, the first of equal ones.

    log_q: [..., Vd], label: int64 [...]; returns [...]
    """
    return -log_q.gather(-1, label.unsqueeze(-1)).squeeze(-1)


def _mean(p: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """sum_v p (a - b), where a and b count only at p > 0: there alone may they be -inf."""
    return (p * torch.where(p > 0, a - b, 0.0)).sum(dim=-1)


_DIVERGENCES: dict[LossKind, Callable[[Tensor, Tensor], Tensor]] = {
    LossKind.kl: kl,
    LossKind.reverse_kl: reverse_kl,
    LossKind.js: js,
    LossKind.tv: tv,
}
