"""A small store and small sample files, made by hand from seeds."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
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


@dataclass(frozen=True)
class Sample:
    """One row as the verifier gave it: ids, mask [T], states [T, 4, HIDDEN] (the last one pre-norm)."""

    ids: Tensor
    mask: Tensor
    states: Tensor


def make_samples(count: int = 12, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[Sample]:
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    samples = []
    for _ in range(count):
        length = rng.randint(3, 20)
        ids = torch.randint(VOCAB, (length,), generator=generator)
        mask = torch.randint(2, (length,), generator=generator)
        samples.append(Sample(ids, mask, torch.randn(length, 4, HIDDEN, generator=generator).to(dtype)))
    return samples


def write_store(
    path: Path,
    samples: list[Sample],
    shard_tokens: int = 40,
    dtype: str | None = None,
    last_state_rows: str = "all",
) -> None:
    """A store of the samples; every fifth row is validation."""
    manifest = Manifest(
        verifier=VerifierIdentity("LlamaForCausalLM", "c", "w", HIDDEN, 8, VOCAB),
        tokenizer_hash="t",
        template_hash="j",
        template_args_hash="a",
        layer_ids=LAYERS,
        last_state_rows=last_state_rows,
        dtype=dtype or str(samples[0].states.dtype).removeprefix("torch."),
        engine={"name": "hf"},
    )
    rows, by_id = [], {}
    for i, sample in enumerate(samples):
        ids, mask = tuple(sample.ids.tolist()), tuple(sample.mask.tolist())
        split = "validation" if i % 5 == 4 else "train"
        rows.append(FakeRow(row_id_of(ids, mask), f"c{i}", f"talk.jsonl:{i + 1}", split, ids, mask))
        by_id[rows[-1].row_id] = sample
    with StoreWriter(path, manifest, rows, shard_tokens) as writer:
        for number, planned in writer.pending():
            parts = [(row, by_id[row.row_id]) for row in planned]
            writer.write_shard(
                number,
                [(row, s.states[:, :3].flatten(1), s.states[:, 3].contiguous(), s.ids) for row, s in parts],
            )
        writer.finish()


def write_v0(path: Path, samples: list[Sample]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        aux, last = s.states[:, :3].flatten(1), s.states[:, 3].contiguous()
        data = {"hidden_state": aux, "target": last, "input_ids": s.ids, "loss_mask": s.mask}
        torch.save(data, path / f"data_{i}.pt")


def write_v1(path: Path, samples: list[Sample]) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for i, s in enumerate(samples):
        states = [part.contiguous() for part in s.states.unbind(1)]
        torch.save({"hidden_states": states, "input_ids": s.ids, "loss_mask": s.mask}, path / f"data_{i}.pt")


def write_arrow(path: Path, samples: list[Sample]) -> None:
    """The layout of speculators 0.5 to 0.9: an Arrow dataset with hidden_states/hs_<i>.safetensors inside."""
    from datasets import Dataset

    rows = [
        {"input_ids": s.ids.tolist(), "loss_mask": s.mask.tolist(), "seq_len": len(s.ids)} for s in samples
    ]
    Dataset.from_list(rows).save_to_disk(str(path))
    (path / "hidden_states").mkdir()
    for i, s in enumerate(samples):
        save_file(
            {"hidden_states": s.states.contiguous(), "token_ids": s.ids},
            path / "hidden_states" / f"hs_{i}.safetensors",
        )


def aligned(sample: Sample, layers: tuple[int, ...] = (0, 1, 2)) -> dict[str, Any]:
    """A training item written out position by position: what the draft sees and must predict."""
    length = len(sample.ids)
    rows = []
    for i in range(length - 1):
        rows.append(
            {
                "input_ids": int(sample.ids[i + 1]),
                "loss_mask": bool(sample.mask[i + 1]),
                "position_ids": i + 1,
                "hidden_states": torch.cat([sample.states[i, k] for k in layers]),
                "verifier_last_hidden_states": sample.states[i + 1, 3],
            }
        )
    stacked: dict[str, Any] = {
        name: torch.stack([row[name] for row in rows])
        for name in ("hidden_states", "verifier_last_hidden_states")
    }
    for name in ("input_ids", "loss_mask", "position_ids"):
        stacked[name] = torch.tensor([row[name] for row in rows])
    stacked["lengths"] = torch.tensor([length - 1])
    return stacked


@pytest.fixture
def make() -> SimpleNamespace:
    return SimpleNamespace(
        samples=make_samples,
        store=write_store,
        v0=write_v0,
        v1=write_v1,
        arrow=write_arrow,
        aligned=aligned,
        HIDDEN=HIDDEN,
        LAYERS=LAYERS,
    )


@pytest.fixture
def store(tmp_path: Path) -> Path:
    write_store(tmp_path / "store", make_samples())
    return tmp_path / "store"
