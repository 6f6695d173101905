"""Naming the suspect when hidden states do not agree with the verifier.

Every slot is compared with every layer of the reference, with the states before and after the final
norm, and with rows moved by one in both directions; what fits best says what went wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lab.engines.base import States
from eagle3lab.extract.alignment import SelfTestReport, relative_errors
from eagle3lab.extract.reference import Reference

POST_NORM = "post-norm"
SHIFTS = (0, 1, -1)
MATCH_SHARE = 0.3  # another candidate explains a slot when its error is below this share of the slot's own
VOTES = 0.7  # share of tokens that must agree on a shift; unrelated states give a third
UNRELATED = 0.5  # a relative error above this is no relation at all


@dataclass(frozen=True)
class Match:
    """The candidate that fits a slot best. Layer id num_layers is the state before the final norm."""

    own: int | str
    own_error: float
    layer: int | str
    shift: int  # the state at position i belongs to token i + shift
    error: float
    moved_votes: dict[int, float]  # shift -> share of tokens that its own layer fits best under this shift
    scale: float  # least-squares factor between the slot and its own layer
    scaled_error: float  # own error once that factor is taken out

    @property
    def elsewhere(self) -> bool:
        """Another layer or another token fits clearly better than the slot's own."""
        return (self.layer, self.shift) != (self.own, 0) and self.error < MATCH_SHARE * self.own_error


def diagnose(
    samples: Sequence[States],
    references: Sequence[Reference],
    layer_ids: Sequence[int],
    report: SelfTestReport,
    last_kept: Sequence[Tensor] | None = None,
) -> str:
    """One sentence that names what the measured errors point to. last_kept: as of `measure`."""
    everywhere = [torch.ones(len(s.token_ids), dtype=torch.bool) for s in samples]
    last_kept = last_kept or everywhere
    num_layers = len(references[0].hidden) - 1
    hidden_size = references[0].pre_norm.shape[-1]
    aux = []
    for slot, layer_id in enumerate(layer_ids):
        columns = slice(slot * hidden_size, (slot + 1) * hidden_size)
        slots = [s.aux[:, columns].float() for s in samples]
        aux.append(_best_match(slots, references, layer_id, everywhere))
    last = _best_match([s.last.float() for s in samples], references, num_layers, last_kept)
    everything = [*aux, last]
    bound = report.tolerance.state_error

    for shift in (1, -1):
        votes = sum(match.moved_votes[shift] for match in everything) / len(everything)
        if votes > VOTES:
            return (
                f"tokens and states are shifted by one against each other: the states at position i "
                f"belong to token i{shift:+d} ({votes:.0%} of the states fit there better than in place)"
            )
    found = []
    if moved := [match for match in aux if match.elsewhere]:
        found.append(_name_layers(aux, moved))
    if last.elsewhere:
        if last.layer == POST_NORM:
            found.append(
                f"the last state is post-norm: taken after the final norm (error {last.error:.2g} against "
                f"the normed state, {last.own_error:.2g} against the state before the norm)"
            )
        else:
            found.append(
                f"the last state holds {_place(last)} instead of layer {num_layers} before the final norm"
            )
    if found:
        return "; ".join(found)
    if all(match.scaled_error <= bound and abs(match.scale - 1) > bound for match in everything):
        return f"all states are scaled by {last.scale:.4g}: another dtype or a scale that was not undone"
    if all(match.own_error <= bound for match in everything):
        if stray := _stray_tokens(samples, references, layer_ids, bound, last_kept):
            return stray
        return (
            "the states are right but final norm + head do not give the verifier's distribution: the head or "
            "the final norm was read wrongly (tied head, 1 + w norm), or the model changes its logits after "
            "the head"
        )
    wrong = [match for match in everything if match.own_error > bound]
    if len(wrong) < len(everything) and all(match.error > UNRELATED for match in wrong):
        names = ", ".join(_label(match.own, num_layers) for match in wrong)
        return f"{names}: no layer or token fits, while the other slots are right: these states were damaged"
    if min(match.error for match in everything) > UNRELATED:
        return (
            "nothing matches any layer, norm or neighbouring token: the states are of another checkpoint of the "
            f"same shape, or of other text (smallest error {min(match.error for match in everything):.2g})"
        )
    return (
        "every slot is nearest to its own layer but too far from it: another checkpoint of the same family "
        "(a fine-tune, a quantisation), or a coarser dtype than stated"
    )


def _best_match(
    slots: Sequence[Tensor], references: Sequence[Reference], own: int, kept: Sequence[Tensor]
) -> Match:
    num_layers = len(references[0].hidden) - 1
    candidates: dict[int | str, list[Tensor]] = {
        k: [r.hidden[k] for r in references] for k in range(num_layers)
    }
    candidates[num_layers] = [r.pre_norm for r in references]
    candidates[POST_NORM] = [r.hidden[num_layers] for r in references]
    errors = {
        (layer, shift): _median_error(slots, tensors, shift, kept)
        for layer, tensors in candidates.items()
        for shift in SHIFTS
    }
    (layer, shift), error = min(errors.items(), key=lambda item: item[1])
    where = torch.cat(list(kept))
    got, want = torch.cat(list(slots))[where], torch.cat(candidates[own])[where]
    scale = float((got * want).sum() / want.square().sum().clamp_min(1e-12))
    scaled = float(relative_errors(got / scale, want).median()) if scale else float("inf")
    return Match(
        own, errors[own, 0], layer, shift, error, _shift_votes(slots, candidates[own], kept), scale, scaled
    )


def _shift_votes(
    slots: Sequence[Tensor], tensors: Sequence[Tensor], kept: Sequence[Tensor]
) -> dict[int, float]:
    """Which neighbour each token fits best.

    A vote and not an error: with the ids moved, the reference saw one token more or less than the
    states did, so even the right neighbour does not fit exactly.
    """
    best = [
        torch.stack(
            [relative_errors(slot[1:-1], tensor[1 + s : len(tensor) - 1 + s]) for s in SHIFTS]
        ).argmin(0)[keep[1:-1]]
        for slot, tensor, keep in zip(slots, tensors, kept, strict=True)
        if len(slot) > 2
    ]
    votes = torch.cat(best) if best else torch.zeros(1)
    return {s: float((votes == i).float().mean()) for i, s in enumerate(SHIFTS)}


def _stray_tokens(
    samples: Sequence[States],
    references: Sequence[Reference],
    layer_ids: Sequence[int],
    bound: float,
    last_kept: Sequence[Tensor],
) -> str:
    """Tokens that are wrong while most are right, as mixed up batches, chunks or caches leave them."""
    wrong: list[tuple[int, int]] = []
    for i, (states, reference) in enumerate(zip(samples, references, strict=True)):
        got = torch.cat([states.aux, states.last], dim=-1).float().split(reference.pre_norm.shape[-1], dim=-1)
        want = [*(reference.hidden[k] for k in layer_ids), reference.pre_norm]
        errors = torch.stack([relative_errors(g, w) for g, w in zip(got, want, strict=True)])
        errors[-1] = errors[-1].where(last_kept[i], 0.0)
        errors = errors.amax(0)
        wrong += [(i, int(t)) for t in (errors > bound).nonzero()]
    if not wrong:
        return ""
    total = sum(len(states.token_ids) for states in samples)
    return (
        f"{len(wrong)} of {total} tokens hold other states while the rest is right, the first of them sampled "
        f"row {wrong[0][0]}, token {wrong[0][1]}: batches, chunks or cached prefixes were mixed up"
    )


def _median_error(
    slots: Sequence[Tensor], tensors: Sequence[Tensor], shift: int, kept: Sequence[Tensor]
) -> float:
    """Median over tokens, so that a wrong token at a border does not hide what fits everywhere else."""
    pieces = []
    for slot, tensor, keep in zip(slots, tensors, kept, strict=True):
        n = len(slot)
        here = slice(max(0, -shift), n - max(0, shift))
        errors = relative_errors(slot[here], tensor[max(0, shift) : n - max(0, -shift)])
        pieces.append(errors[keep[here]])
    joined = torch.cat(pieces)
    return float(joined.median()) if len(joined) else float("inf")


def _name_layers(aux: Sequence[Match], moved: Sequence[Match]) -> str:
    own, best = [m.own for m in aux], [m.layer if m.elsewhere else m.own for m in aux]
    detail = ", ".join(
        f"slot {slot} (id {m.own}) holds {_place(m)} "
        f"(error {m.own_error:.2g} as {m.own}, {m.error:.2g} as {m.layer})"
        for slot, m in enumerate(aux)
        if m.elsewhere
    )
    if sorted(map(str, own)) == sorted(map(str, best)):
        return f"aux slots are swapped: {detail}"
    steps = {m.layer - m.own for m in moved if isinstance(m.layer, int) and isinstance(m.own, int)}
    if len(moved) == len(aux) and len(steps) == 1:
        return f"every aux slot is {steps.pop():+d} layer off (another layer id convention): {detail}"
    return f"aux slots hold other layers: {detail}"


def _place(match: Match) -> str:
    layer = "the post-norm state" if match.layer == POST_NORM else f"layer {match.layer}"
    return layer if match.shift == 0 else f"{layer} of the {'next' if match.shift > 0 else 'previous'} token"


def _label(own: int | str, num_layers: int) -> str:
    return "last state" if own == num_layers else f"layer {own}"
