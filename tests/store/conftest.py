"""Hand-made rows, states and stores: small, seeded, and without any verifier."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest, VerifierIdentity
from eagle3lab.store.writer import StoreWriter

HIDDEN, LAYERS, VOCAB = 8, (2, 4, 5), 97


@dataclass(frozen=True)
class FakeRow:
    row_id: str
    conversation_id: str
    source: str
    split: str
    input_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]


def make_rows(count: int = 12, seed: int = 0) -> list[FakeRow]:
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        length = rng.randint(3, 20)
        ids = tuple(rng.randrange(VOCAB) for _ in range(length))
        mask = tuple(rng.randint(0, 1) for _ in range(length))
        split = "validation" if i % 5 == 4 else "train"
        rows.append(
            FakeRow(row_id_of(ids, mask), f"conversation{i}", f"talk.jsonl:{i + 1}", split, ids, mask)
        )
    return rows


def make_states(row: FakeRow, dtype: torch.dtype) -> tuple[FakeRow, Tensor, Tensor, Tensor]:
    """States that depend on the row's content only, as a verifier's do."""
    generator = torch.Generator().manual_seed(int(row.row_id[:8], 16))
    length = len(row.input_ids)
    aux = torch.randn(length, len(LAYERS) * HIDDEN, generator=generator).to(dtype)
    last = torch.randn(length, HIDDEN, generator=generator).to(dtype)
    return row, aux, last, torch.tensor(row.input_ids)


def make_manifest(**changes: Any) -> Manifest:
    identity = {
        "architecture": "LlamaForCausalLM",
        "config_hash": "c" * 8,
        "weight_fingerprint": "w" * 8,
        "hidden_size": HIDDEN,
        "num_layers": 8,
        "vocab_size": VOCAB,
        "name": "fake",
    }
    identity |= {key: changes.pop(key) for key in list(changes) if key in identity}
    values: dict[str, Any] = {
        "verifier": VerifierIdentity(**identity),
        "tokenizer_hash": "t" * 8,
        "template_hash": "j" * 8,
        "template_args_hash": "a" * 8,
        "layer_ids": LAYERS,
        "dtype": "bfloat16",
        "engine": {"name": "hf", "transformers": "5.19.0"},
        "accounting": {"read": 12, "kept": 12, "dropped": {}},
    }
    return Manifest(**(values | changes))


def write_store(
    path: Path,
    rows: Sequence[FakeRow],
    manifest: Manifest,
    shard_tokens: int = 40,
    stop_before: int | None = None,
) -> Manifest | None:
    """Write a store, or only its shards before number `stop_before`."""
    dtype = torch.float32 if manifest.dtype == "float32" else torch.bfloat16
    with StoreWriter(path, manifest, rows, shard_tokens) as writer:
        for number, planned in writer.pending():
            if stop_before is not None and number >= stop_before:
                return None
            writer.write_shard(number, [make_states(row, dtype) for row in planned])
        return writer.finish()


def tree_bytes(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}


@pytest.fixture
def fake() -> SimpleNamespace:
    return SimpleNamespace(
        rows=make_rows,
        states=make_states,
        manifest=make_manifest,
        write=write_store,
        tree=tree_bytes,
        HIDDEN=HIDDEN,
        LAYERS=LAYERS,
        VOCAB=VOCAB,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A complete bf16 store of 12 rows in several shards."""
    write_store(tmp_path / "store", make_rows(), make_manifest())
    return tmp_path / "store"


@pytest.fixture
def flip_byte() -> Callable[[Path, int], None]:
    def flip(path: Path, at: int) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return flip
