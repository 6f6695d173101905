"""The checks that every row of states passes when it is written and again when it is read."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem


def check_tokens(expected: Tensor, found: Tensor, where: str) -> None:
    """Raise IntegrityError unless the states' own token ids [T] are exactly the row's."""
    if expected.shape != found.shape:
        raise IntegrityError(
            Problem(
                f"the states of {where} belong to another number of tokens",
                value=list(found.shape),
                expected=f"{list(expected.shape)}",
            )
        )
    different = (expected != found).nonzero().flatten()
    if len(different):
        at = int(different[0])
        raise IntegrityError(
            Problem(
                f"the states of {where} belong to other tokens ({len(different)} of {len(expected)} differ); "
                f"position {at}",
                value=int(found[at]),
                expected=f"token id {int(expected[at])}",
            )
        )


def check_states(
    aux: Tensor,
    last: Tensor,
    *,
    length: int,
    hidden_size: int,
    slots: Sequence[str],
    dtype: torch.dtype,
    where: str,
    num_last: int | None = None,
) -> None:
    """Raise IntegrityError unless the states of one row are whole, finite and nowhere all zero.

    aux: [T, len(slots) * hidden_size], last: [num_last, hidden_size], by default [T, hidden_size]. `slots`
    names the aux slots in messages.
    """
    num_last = length if num_last is None else num_last
    for name, states, count, width in (
        ("aux states", aux, length, len(slots) * hidden_size),
        ("last state", last, num_last, hidden_size),
    ):
        shape = [count, width]
        if list(states.shape) != shape:
            raise IntegrityError(
                Problem(f"{name} of {where}: shape", list(states.shape), expected=f"{shape}")
            )
        if states.dtype != dtype:
            raise IntegrityError(Problem(f"{name} of {where}: dtype", str(states.dtype), expected=str(dtype)))
    check_values(aux.reshape(length, len(slots), hidden_size), slots, where)
    check_values(last.reshape(num_last, 1, hidden_size), ["last state"], where)


def check_values(states: Tensor, slots: Sequence[str], where: str) -> None:
    """Raise IntegrityError when `states` [T, len(slots), hidden] hold NaN, Inf or an all-zero vector.

    One norm per vector decides; only a suspicious one is looked at in full (it may only have overflowed).
    """
    norms = torch.linalg.vector_norm(states, dim=-1)  # shape: [T, num_slots]
    if bool(((norms > 0) & torch.isfinite(norms)).all()):
        return
    problems = []
    for slot, name in enumerate(slots):
        values = states[:, slot]
        counts = {"NaN": int(values.isnan().sum()), "Inf": int(values.isinf().sum())}
        zero = int((values == 0).all(dim=-1).sum())
        if zero:
            counts[f"of {len(values)} positions all zero"] = zero
        found = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
        if found:
            problems.append(Problem(f"{where}: {found} in {name}"))
    if problems:
        raise IntegrityError(*problems)


def slot_names(layer_ids: Sequence[int]) -> list[str]:
    """Names of the aux slots of a store, for messages."""
    return [f"layer {k}" for k in layer_ids]
