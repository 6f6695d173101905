"""How many bytes the rows of a plan will take in its store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from eagle3lab.rows.rows import Row
from eagle3lab.store.disk import estimate_bytes
from eagle3lab.store.last_states import num_kept
from eagle3lab.store.manifest import Manifest

BYTES_PER_TOKEN_BESIDE_STATES = 9  # its id and its mask


def state_bytes(rows: Sequence[Row], manifest: Manifest) -> int:
    """Of the hidden states of some rows."""
    num_tokens = _num_tokens(rows)
    num_last = num_tokens if manifest.all_last_states else sum(num_kept(row.loss_mask) for row in rows)
    return _states(num_tokens, manifest, num_last)


def disk_bytes(rows: Sequence[Row], manifest: Manifest) -> int:
    """Of some rows, their ids and masks included."""
    return state_bytes(rows, manifest) + BYTES_PER_TOKEN_BESIDE_STATES * _num_tokens(rows)


def describe_disk(store: Path, rows: Sequence[Row], manifest: Manifest) -> str:
    """One line: tokens, states of a token, and what they come to."""
    num_tokens, num_states = _num_tokens(rows), f"{len(manifest.layer_ids) + 1}"
    if not manifest.all_last_states:  # on average
        whole = _states(num_tokens, manifest, num_tokens)
        num_states = f"{(len(manifest.layer_ids) + 1) * state_bytes(rows, manifest) / whole:.2f}"
    return (
        f"disk: {num_tokens:,} tokens x {num_states} states x {manifest.verifier.hidden_size} x "
        f"{manifest.dtype} = {disk_bytes(rows, manifest) / 2**20:,.1f} MiB in {store}"
    )


def _num_tokens(rows: Sequence[Row]) -> int:
    return sum(len(row.input_ids) for row in rows)


def _states(num_tokens: int, manifest: Manifest, num_last: int) -> int:
    hidden_size, num_ids = manifest.verifier.hidden_size, len(manifest.layer_ids)
    return estimate_bytes(num_tokens, hidden_size, num_ids, manifest.dtype, num_last)
