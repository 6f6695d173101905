"""One shard: the concatenated rows of a few thousand tokens in one safetensors file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.store.files import sha256_of, write_atomically
from eagle3lab.store.manifest import FORMAT, Manifest

INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
AUX = "aux_hidden_states"
LAST = "verifier_last_hidden_states"
TOKEN_COUNTS_FILE = "token_counts.safetensors"
TOKEN_COUNTS = "token_counts"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_HEADER_DTYPES = {"bfloat16": "BF16", "float32": "F32"}


def write_shard(path: Path, manifest: Manifest, number: int, tensors: Mapping[str, Tensor]) -> str:
    """Write one shard at once or not at all; returns the sha256 of the file.

    tensors: input_ids [N] int64, loss_mask [N] uint8, aux_hidden_states [N, n_aux * hidden],
    verifier_last_hidden_states [N, hidden].
    """
    metadata = _metadata(manifest, number)
    write_atomically(path, lambda temporary: save_file(dict(tensors), temporary, metadata=metadata))
    return sha256_of(path)


def open_shard(path: Path) -> Any:
    """A memory-mapped safetensors handle. Raises IntegrityError for a missing or cut file."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise IntegrityError(Problem(f"{path} cannot be read as a shard ({error})")) from error


def check_header(path: Path, manifest: Manifest, number: int, num_tokens: int) -> None:
    """Raise IntegrityError unless the file is whole and its shapes, dtypes and origin are the store's."""
    hidden = manifest.verifier.hidden_size
    expected = {
        INPUT_IDS: ([num_tokens], "I64"),
        LOSS_MASK: ([num_tokens], "U8"),
        AUX: ([num_tokens, len(manifest.layer_ids) * hidden], _HEADER_DTYPES[manifest.dtype]),
        LAST: ([num_tokens, hidden], _HEADER_DTYPES[manifest.dtype]),
    }
    with open_shard(path) as file:
        found = {}
        for name in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
            part = file.get_slice(name)
            found[name] = (part.get_shape(), part.get_dtype())
        metadata = file.metadata()
    problems = [
        Problem(f"{path}: {name}", value=found.get(name), expected=f"{expected.get(name)}")
        for name in sorted({*expected, *found})
        if expected.get(name) != found.get(name)
    ]
    if metadata != _metadata(manifest, number):
        problems.append(Problem(f"{path}: origin", value=metadata, expected=f"{_metadata(manifest, number)}"))
    if problems:
        raise IntegrityError(*problems)


def _metadata(manifest: Manifest, number: int) -> dict[str, str]:
    """A single key: the order in which safetensors writes several is not fixed, and bytes must be."""
    origin = {
        "format_version": manifest.format_version,
        "shard": number,
        "layer_ids": list(manifest.layer_ids),
        "layer_convention": manifest.layer_convention,
        "last_state": manifest.last_state,
        "weight_fingerprint": manifest.verifier.weight_fingerprint,
    }
    return {FORMAT: json.dumps(origin, sort_keys=True)}
