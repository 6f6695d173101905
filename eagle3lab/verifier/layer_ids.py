"""Which verifier layers feed the draft. Id k is the output of decoder layer k, counted from 1.

That is Hugging Face's `hidden_states[k]` and vLLM's id k; 0 is the embedding, and the number of
layers itself is the verifier's last hidden state, which is always kept and never an aux layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from eagle3lab.config.errors import Problem, UserError, raise_all

OVERRIDE = "model.aux_layer_ids"


def default_aux_layer_ids(num_layers: int, *, override: str = OVERRIDE) -> tuple[int, ...]:
    """(2, n // 2, n - 3) of n layers: the early, middle and late layer of EAGLE-3's reference code.

    `override` names the setting that takes other ids. Raises `UserError` with ids to use instead where those three are not distinct, increasing and >= 1.
    """
    ids = (2, num_layers // 2, num_layers - 3)
    if 1 <= ids[0] < ids[1] < ids[2]:
        return ids
    spread = spread_layer_ids(num_layers)
    raise UserError(
        Problem(
            f"the default aux layers 2, n//2, n-3 of a verifier with {num_layers} layers",
            list(ids),
            "distinct, increasing ids of at least 1",
            _setting(override, spread),
        )
    )


def spread_layer_ids(num_layers: int) -> tuple[int, ...]:
    """At most three valid ids: first, middle and last but one layer; () for a single layer."""
    ids = {1, num_layers // 2, num_layers - 1}
    return tuple(sorted(i for i in ids if 1 <= i < num_layers))


def check_aux_layer_ids(ids: Sequence[int], num_layers: int, *, override: str = OVERRIDE) -> tuple[int, ...]:
    """`ids` as a tuple, where each is in 1..num_layers-1 and they increase strictly.

    `override` names the setting the ids came from, `--layer-ids` as an option. Order is part of a draft's meaning (it fixes the
    columns of the first projection), and engines return ascending ids whatever was asked: another
    order is an error and is not sorted. Raises `UserError`.
    """
    problems: list[Problem] = []
    proposal = _setting(override, _proposed(ids, num_layers))
    if not ids:
        problems.append(Problem("no aux layer ids", None, "at least one", proposal))
    if not all(_is_whole(i) for i in ids):
        raise UserError(Problem("aux layer ids", list(ids), "whole numbers", proposal))
    if any(i < 1 for i in ids):
        problems.append(
            Problem(
                "aux layer ids below 1",
                [i for i in ids if i < 1],
                "outputs of decoder layers counted from 1; 0 would be the embedding",
                proposal,
            )
        )
    if any(i >= num_layers for i in ids):
        problems.append(
            Problem(
                f"aux layer ids of a verifier with {num_layers} layers",
                [i for i in ids if i >= num_layers],
                f"at most {num_layers - 1}; the state after the last layer is kept in any case",
                proposal,
            )
        )
    if any(a >= b for a, b in pairwise(ids)):
        problems.append(Problem("aux layer ids", list(ids), "strictly increasing ids", proposal))
    raise_all(problems)
    return tuple(ids)


def _setting(override: str, ids: Sequence[int]) -> str:
    if not ids:
        return "a verifier with at least 2 layers"
    return " ".join([override, *map(str, ids)]) if override.startswith("--") else f"{override}={list(ids)}"


def _proposed(ids: Sequence[int], num_layers: int) -> list[int]:
    """The caller's ids in order where all of them are valid layers, else the defaults or a spread."""
    valid = sorted({i for i in ids if _is_whole(i) and 1 <= i < num_layers})
    if valid and len(valid) == len(set(ids)):
        return valid
    try:
        return list(default_aux_layer_ids(num_layers))
    except UserError:
        return list(spread_layer_ids(num_layers))


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
