"""How far hidden states are from the reference, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3lab.engines.base import States
from eagle3lab.extract.reference import Reference
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights, verifier_logits


@dataclass(frozen=True)
class Tolerance:
    """Bounds for one pair of compute and storage dtype.

    Errors are relative, |a - b| / |b| per token; `quantile` of the tokens must lie within. bf16 kernels
    differ by 1 to 2 % between engines, with a tail at tokens of unusual norm; rounding to bf16 alone
    is 0.2 %, rounding to fp8 with a scale per token 2 to 3.4 %.
    """

    name: str
    state_error: float
    logit_error: float  # of the logits less their mean over the vocabulary
    kl: float  # nats, mean over tokens
    argmax_agreement: float  # share of tokens; a tie within logit_error of the logits' spread agrees
    quantile: float = 1.0


def tolerance_for(compute: torch.dtype, storage: torch.dtype) -> Tolerance:
    """The bounds for states computed in `compute` and kept in `storage`."""
    if storage == torch.float8_e4m3fn:
        if compute != torch.float32:
            return Tolerance("bf16 compute, fp8 storage", 0.09, 0.25, 0.1, 0.9, quantile=0.95)
        return Tolerance("fp32 compute, fp8 storage", 0.05, 0.12, 0.02, 0.97, quantile=0.99)
    if compute != torch.float32:
        return Tolerance("bf16 compute", 0.08, 0.25, 0.1, 0.9, quantile=0.95)
    if storage != torch.float32:
        return Tolerance("fp32 compute, bf16 storage", 0.01, 0.05, 0.01, 0.98)
    return Tolerance("fp32", 1e-3, 1e-3, 1e-4, 0.999)


@dataclass(frozen=True)
class SelfTestReport:
    """What the alignment self-test measured."""

    rows: int
    tokens: int
    tolerance: Tolerance
    argmax_agreement: float  # stored last state -> final norm -> head, against the verifier's own logits
    mean_kl: float  # nats, KL(verifier || from the stored last state)
    logit_error: float
    last_error: float  # last state against the input of the verifier's final norm
    aux_errors: dict[int, float]  # layer id -> error against hidden_states[id]

    @property
    def passed(self) -> bool:
        """Whether every figure is within its bound. NaN is not."""
        t = self.tolerance
        return (
            self.argmax_agreement >= t.argmax_agreement
            and self.mean_kl <= t.kl
            and self.logit_error <= t.logit_error
            and self.last_error <= t.state_error
            and all(error <= t.state_error for error in self.aux_errors.values())
        )

    def __str__(self) -> str:
        aux = ", ".join(f"{k}: {error:.1e}" for k, error in self.aux_errors.items())
        return (
            f"{self.rows} rows, {self.tokens} tokens ({self.tolerance.name}): argmax agreement "
            f"{self.argmax_agreement:.4f}, KL {self.mean_kl:.1e}, logits {self.logit_error:.1e}, "
            f"last state {self.last_error:.1e}, aux layers {{{aux}}}"
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def measure(
    samples: Sequence[States],
    references: Sequence[Reference],
    layer_ids: Sequence[int],
    facts: VerifierFacts,
    edge: EdgeWeights,
    tolerance: Tolerance,
    last_kept: Sequence[Tensor] | None = None,
) -> SelfTestReport:
    """All figures of the self-test over the tokens of all samples.

    last_kept: bool [T] of every sample, where its last state is one; elsewhere it is not looked at. In some
    sample there must be one.
    """
    slot_errors: list[list[Tensor]] = [[] for _ in layer_ids]
    last_errors, logit_errors, kls, agreements = [], [], [], []
    for i, (states, reference) in enumerate(zip(samples, references, strict=True)):
        keep = slice(None) if last_kept is None else last_kept[i]
        slots = states.aux.float().split(facts.hidden_size, dim=-1)
        for errors, slot, layer_id in zip(slot_errors, slots, layer_ids, strict=True):
            errors.append(relative_errors(slot, reference.hidden[layer_id]))
        last, wanted = states.last[keep].float(), reference.logits[keep]
        if not len(last):
            continue
        last_errors.append(relative_errors(last, reference.pre_norm[keep]))
        logits = verifier_logits(last, edge, facts.rms_norm_eps).float()
        logit_errors.append(relative_errors(_centered(logits), _centered(wanted)))
        log_p = wanted.log_softmax(-1)
        kls.append((log_p.exp() * (log_p - logits.log_softmax(-1))).sum(-1))
        agreements.append(_same_argmax(logits, wanted, tolerance.logit_error))
    q = tolerance.quantile
    return SelfTestReport(
        rows=len(samples),
        tokens=sum(len(states.token_ids) for states in samples),
        tolerance=tolerance,
        argmax_agreement=float(torch.cat(agreements).float().mean()),
        mean_kl=float(torch.cat(kls).mean()),
        logit_error=_quantile(logit_errors, q),
        last_error=_quantile(last_errors, q),
        aux_errors={k: _quantile(errors, q) for k, errors in zip(layer_ids, slot_errors, strict=True)},
    )


def relative_errors(got: Tensor, want: Tensor) -> Tensor:
    """|got - want| / |want| of every token: [T, H], [T, H] -> [T]."""
    return (got - want).norm(dim=-1) / want.norm(dim=-1).clamp_min(1e-12)


def _centered(logits: Tensor) -> Tensor:
    return logits - logits.mean(-1, keepdim=True)


def _same_argmax(got: Tensor, want: Tensor, tie: float) -> Tensor:
    chosen = want.gather(-1, got.argmax(-1, keepdim=True)).squeeze(-1)
    return want.amax(-1) - chosen <= tie * want.std(-1)


def _quantile(errors: Sequence[Tensor], q: float) -> float:
    return float(torch.cat(list(errors)).quantile(q))
