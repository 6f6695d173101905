"""The one place where tokens, states and masks are aligned for training."""

from __future__ import annotations

from typing import Any

Batch = dict[str, Any]
STATES = ("hidden_states", "verifier_last_hidden_states")
SCALES = "_scales"  # of fp8 states lie under the states' name with this behind it
# Beside raw states of a store that keeps only some last states: bool, where they belong. Row by row such states
# and their scales are [M, ...], those of the marked positions alone; in a pack they are in place, among zeros.
LAST_KEPT = STATES[1] + "_kept"


def shift_batch(batch: Batch) -> Batch:
    """Pair position i's aux states with the token and the target that follow: (x[i+1], g[i], y[i+1], l[i+1]).

    Takes input_ids, hidden_states, verifier_last_hidden_states, loss_mask, position_ids of length T and
    lengths [1]; returns the same keys with length T - 1. Positions start at 1 when they came from 0.
    Scales of fp8 states, where there are any, move with their states. Last states beside LAST_KEPT are none of
    position 0, so all of them stay.
    The alignment is that of speculators' `shift_batch`.
    """
    aux, last = (name + SCALES for name in STATES)
    kept = {LAST_KEPT: batch[LAST_KEPT][1:]} if LAST_KEPT in batch else {}  # shape: [T - 1]
    after = slice(None) if kept else slice(1, None)
    scales = {aux: batch[aux][:-1], last: batch[last][after]} if aux in batch else {}
    return {
        "input_ids": batch["input_ids"][1:],  # shape: [T - 1]
        "hidden_states": batch["hidden_states"][:-1],  # shape: [T - 1, n_aux * hidden_size]
        "verifier_last_hidden_states": batch["verifier_last_hidden_states"][
            after
        ],  # shape: [T - 1, hidden_size], or [M, hidden_size]
        "loss_mask": batch["loss_mask"][1:],  # shape: [T - 1]
        "lengths": batch["lengths"] - 1,  # shape: [1]
        "position_ids": batch["position_ids"][1:],  # shape: [T - 1]
        **scales,  # shapes: [T - 1, n_aux], [T - 1, 1] or [M, 1]
        **kept,
    }
