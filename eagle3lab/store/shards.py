"""One shard: the concatenated rows of a few thousand tokens in one safetensors file.

In an fp8 store the two state tensors are float8_e4m3 and their scales, one per token and slot, lie beside
them: aux_scales [N, n_aux] and verifier_last_scales [N, 1]. A store of supervised last states has M in place
of N for the last state and its scales: see `last_states`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.store.files import write_atomically
from eagle3lab.store.fp8 import check_scales, dequantize, quantize
from eagle3lab.store.index import ShardEntry
from eagle3lab.store.manifest import FORMAT, Manifest
from eagle3lab.store.stream import write_safetensors

FLOAT8 = "float8_e4m3"
INPUT_IDS = "input_ids"
LOSS_MASK = "loss_mask"
AUX = "aux_hidden_states"
LAST = "verifier_last_hidden_states"
AUX_SCALES = "aux_scales"
LAST_SCALES = "verifier_last_scales"
LAST_KEPT = "verifier_last_kept"  # in no file: follows from the loss mask
TOKEN_COUNTS = "token_counts"
# a store's dtype -> that of the states which the writer takes and the reader gives
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, FLOAT8: torch.bfloat16}
_HEADER_DTYPES = {"bfloat16": "BF16", "float32": "F32", FLOAT8: "F8_E4M3"}


def write_shard(path: Path, manifest: Manifest, number: int, tensors: Mapping[str, Sequence[Tensor]]) -> str:
    """Write one shard at once or not at all; returns the sha256 of the file.

    tensors: input_ids [N] int64, loss_mask [N] uint8, aux_hidden_states [N, n_aux * hidden],
    verifier_last_hidden_states [N or M, hidden], as they are to lie in the file, each in pieces along N.
    """
    metadata = _metadata(manifest, number)
    digests: list[str] = []
    write_atomically(path, lambda temporary: digests.append(write_safetensors(temporary, tensors, metadata)))
    return digests[0]


def encode(tensors: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """The tensors of one row as the store's dtype keeps them: fp8 states with their scales, else as given."""
    if manifest.dtype != FLOAT8:
        return dict(tensors)
    hidden = manifest.verifier.hidden_size
    encoded = dict(tensors)
    for name, scales_name in ((AUX, AUX_SCALES), (LAST, LAST_SCALES)):
        encoded[name], encoded[scales_name] = quantize(tensors[name], hidden)
    return encoded


def check_stored_scales(stored: Mapping[str, Tensor], where: str) -> None:
    """Raise IntegrityError for scales of an fp8 store that are not finite and positive."""
    for name in (AUX_SCALES, LAST_SCALES):
        check_scales(stored[name], f"{where}: {name}")


def decode(stored: Mapping[str, Tensor], manifest: Manifest) -> dict[str, Tensor]:
    """aux_hidden_states [T, n * hidden] and verifier_last_hidden_states [T or M, hidden] in `DTYPES`."""
    if manifest.dtype != FLOAT8:
        return dict(stored)
    hidden = manifest.verifier.hidden_size
    return {
        name: dequantize(stored[name], stored[scales_name], hidden)
        for name, scales_name in ((AUX, AUX_SCALES), (LAST, LAST_SCALES))
    }


def map_shard(path: Path) -> dict[str, Tensor]:
    """Every tensor of a shard as a view of the mapped file: nothing is read before it is touched.

    The pages are the system's own, shared by all processes that map the shard.
    """
    with open_shard(path) as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping


def slice_states(
    shard: Mapping[str, Tensor],
    manifest: Manifest,
    tokens: slice,
    columns: Sequence[int] | None,
    last_states: slice,
) -> dict[str, Tensor]:
    """Views of the states of some tokens as they lie in a mapped shard; `columns` selects aux slots."""
    hidden = manifest.verifier.hidden_size
    widths = {AUX: hidden, AUX_SCALES: 1} if manifest.dtype == FLOAT8 else {AUX: hidden}
    stored = {}
    for name, width in widths.items():
        part = shard[name]
        if columns is None:
            stored[name] = part[tokens]
        else:
            stored[name] = torch.cat([part[tokens, c * width : (c + 1) * width] for c in columns], dim=1)
    for name in (LAST, LAST_SCALES) if manifest.dtype == FLOAT8 else (LAST,):
        stored[name] = shard[name][last_states]
    return stored


def open_shard(path: Path) -> Any:
    """A memory-mapped safetensors handle. Raises IntegrityError for a missing or cut file."""
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise IntegrityError(Problem(f"{path} cannot be read as a shard ({error})")) from error


def check_header(path: Path, manifest: Manifest, entry: ShardEntry) -> None:
    """Raise IntegrityError unless the file is whole and its shapes, dtypes and origin are the store's."""
    number, num_tokens, num_last = entry.number, entry.num_tokens, entry.num_last_states
    hidden = manifest.verifier.hidden_size
    expected = {
        INPUT_IDS: ([num_tokens], "I64"),
        LOSS_MASK: ([num_tokens], "U8"),
        AUX: ([num_tokens, len(manifest.layer_ids) * hidden], _HEADER_DTYPES[manifest.dtype]),
        LAST: ([num_last, hidden], _HEADER_DTYPES[manifest.dtype]),
    }
    if manifest.dtype == FLOAT8:
        expected[AUX_SCALES] = ([num_tokens, len(manifest.layer_ids)], "F32")
        expected[LAST_SCALES] = ([num_last, 1], "F32")
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
    if not manifest.all_last_states:
        origin["last_state_rows"] = manifest.last_state_rows
    return {FORMAT: json.dumps(origin, sort_keys=True)}
