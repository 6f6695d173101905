"""The loader: what it hands out, what it counts, and what it says of damaged states."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError
from eagle3lab.config.flops import StepWork
from eagle3lab.config.schema import TrainerConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.loader import PackLoader, stays_on_host
from eagle3lab.training.trainer import fit
from eagle3lab.training.work import pack_work

PACKS = [[0, 3], [5], [2, 1], [4, 6]]


def make_loader(tiny: ModuleType, store: StoreReader, threads: int = 0, **options: Any) -> PackLoader:
    data = Eagle3SampleFileDataset(store, split="train", raw=True)
    collate = create_collate_fn(2 * tiny.SEQ_LEN)
    return PackLoader(data, PACKS, collate, num_threads=threads, device=torch.device("cpu"), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3"])
@pytest.mark.parametrize("threads", [0, 2])
def test_packs_come_in_order_as_the_checked_reader_gives_them(
    tiny: ModuleType, tmp_path: Path, dtype: str, threads: int
) -> None:
    store = tiny.write_store(tmp_path / "store", tiny.default_rows(), dtype)
    loader = make_loader(tiny, store, threads)
    plain = Eagle3SampleFileDataset(store, split="train")
    for rows, batch in zip(PACKS, loader, strict=True):
        expected = create_collate_fn(2 * tiny.SEQ_LEN)([plain[row] for row in rows])
        assert batch.keys() == expected.keys()
        assert all(torch.equal(batch[name], tensor) for name, tensor in expected.items())
    loader.finish_check()
    assert loader.packs == len(PACKS)
    per_value, per_state = {"float32": (4, 0), "bfloat16": (2, 0), "float8_e4m3": (1, 4)}[dtype]
    tokens = sum(plain.lengths[row] for rows in PACKS for row in rows)
    assert loader.bytes_read == tokens * 4 * (tiny.HIDDEN * per_value + per_state)


@dataclass(frozen=True)
class Index:
    """As a plan of a step: an object that travels as tensors do."""

    places: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Index:
        return Index(self.places.to(device))


@pytest.mark.parametrize("threads", [0, 2])
def test_what_is_prepared_on_the_host_comes_with_its_pack(
    tiny: ModuleType, store: StoreReader, threads: int
) -> None:
    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        places = batch["loss_mask"][0].nonzero()[:, 0]
        return {"plan": Index(places), "host_count": len(places)}

    for batch in make_loader(tiny, store, threads, prepare=prepare):
        assert torch.equal(batch["plan"].places, batch["loss_mask"][0].nonzero()[:, 0])
        assert batch["host_count"] == int(batch["loss_mask"].sum())
    assert stays_on_host("host_count")
    assert not stays_on_host("plan")


@pytest.mark.parametrize(("reach", "window"), [(None, None), (3, 4)])
def test_the_work_of_all_packs_is_that_of_their_rows_one_by_one(
    tiny: ModuleType, store: StoreReader, reach: int | None, window: int | None
) -> None:
    loader = make_loader(tiny, store, 2, count_work=lambda b: pack_work(b, 3, reach, window))
    batches = list(loader)
    assert all("work" not in key for batch in batches for key in batch)
    data = Eagle3SampleFileDataset(store, split="train")
    total = None
    for rows in PACKS:
        for row in rows:
            mask = data[row]["loss_mask"]
            supervised = int(mask.sum())
            assert bool(mask[len(mask) - supervised :].all())  # rows of the tiny store end in their answer
            work = StepWork.of_answer(len(mask), supervised, 3, reach, window)
            total = work if total is None else total + work
    assert loader.work == total


def test_holes_in_a_mask_and_padding_are_counted_position_by_position() -> None:
    mask, documents = [0, 1, 0, 0, 1, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 1, 1, -1]
    batch = {
        "loss_mask": torch.tensor([mask]).bool(),
        "document_ids": torch.tensor([documents]),
        "position_ids": torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2, 1]]),
    }
    # targets 1, 4 and 7, not the padding: starts of step 0 {1, 4, 7}, of step 1 {0, 3, 6}; nothing sees 5
    assert pack_work(batch, 2) == StepWork(
        tokens=8,
        pairs=21 + 3,
        context=5 + 2,
        context_pairs=15 + 3,
        needed=(6, 3),
        needed_pairs=(1 + 2 + 4 + 5 + 1 + 2, 1 + 4 + 1),
        losses=(3, 3),
    )


def damage(store: StoreReader, split: str) -> None:
    row = next(row for row in store.rows if row.split == split)
    path = store.path / "shards" / f"{row.shard:05d}.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    tensors["aux_hidden_states"][row.offset + 2] = float("nan")
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_damaged_state_ends_the_run_with_its_row_and_layer_and_is_never_in_a_checkpoint(
    tiny: ModuleType, tmp_path: Path, split: str
) -> None:
    store = tiny.write_store(tmp_path / "store", tiny.default_rows())
    damage(store, split)
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, log_every_updates=100)
    module, data = tiny.build(StoreReader(tmp_path / "store"), replace(train, max_epochs=1))
    with pytest.raises(IntegrityError, match=r"rows:\d+.*64 NaN in layer 2"):
        fit(module, data, hardware=tiny.hardware(), train=train, run_dir=tmp_path / "run")
    assert not list((tmp_path / "run").rglob("*.ckpt"))
