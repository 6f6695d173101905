"""Packing samples into one sequence, and the loader around it."""

from __future__ import annotations

import multiprocessing
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from eagle3lab.data import Eagle3SampleFileDataset, PackBatchSampler, create_collate_fn


def test_rows_lie_side_by_side_and_padding_is_marked(store: Path, make: SimpleNamespace) -> None:
    dataset = Eagle3SampleFileDataset(store)
    items = [dataset[i] for i in (3, 0, 7)]
    total = sum(dataset.lengths[i] for i in (3, 0, 7))
    batch = create_collate_fn(total + 9)(items)
    assert batch["lengths"].tolist() == [dataset.lengths[i] for i in (3, 0, 7)]
    assert batch["row_index"].tolist() == [3, 0, 7]
    for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids"):
        assert batch[name].shape[:2] == (1, total + 9)
        assert batch[name].dtype == items[0][name].dtype
        start = 0
        for item in items:
            end = start + int(item["lengths"])
            assert torch.equal(batch[name][0, start:end], item[name])
            start = end
        assert not batch[name][0, total:].any()
    expected = [doc for doc, i in enumerate((3, 0, 7)) for _ in range(dataset.lengths[i])] + [-1] * 9
    assert batch["document_ids"].tolist() == [expected]
    assert batch["hidden_states"].shape[2] == 3 * make.HIDDEN


def test_a_pack_may_be_exactly_full(store: Path) -> None:
    dataset = Eagle3SampleFileDataset(store)
    batch = create_collate_fn(dataset.lengths[0] + dataset.lengths[1])([dataset[0], dataset[1]])
    assert int(batch["document_ids"].min()) == 0


def test_what_does_not_fit_is_refused_and_never_cut(store: Path) -> None:
    dataset = Eagle3SampleFileDataset(store)
    collate = create_collate_fn(dataset.lengths[0] + dataset.lengths[1] - 1)
    with pytest.raises(ValueError, match="more than the pack's"):
        collate([dataset[0], dataset[1]])


def test_samples_of_other_width_dtype_or_length_are_refused(store: Path) -> None:
    narrow = Eagle3SampleFileDataset(store, aux_layer_ids=(2, 4))
    wide, cast = (
        Eagle3SampleFileDataset(store),
        Eagle3SampleFileDataset(store, hidden_states_dtype=torch.float32),
    )
    collate = create_collate_fn(100)
    for other in (narrow[1], cast[1], {**wide[1], "input_ids": wide[1]["input_ids"][1:]}):
        with pytest.raises(ValueError, match="does not go with"):
            collate([wide[0], other])
    with pytest.raises(ValueError, match="at least one row"):
        collate([])


def test_samples_without_a_row_index_are_packed_too(store: Path) -> None:
    item = Eagle3SampleFileDataset(store)[0]
    del item["row_index"]
    assert "row_index" not in create_collate_fn(64)([item])


def test_the_collate_function_can_be_pickled(store: Path) -> None:
    dataset = Eagle3SampleFileDataset(store)
    again = pickle.loads(pickle.dumps(create_collate_fn(64)))([dataset[0]])
    assert torch.equal(again["input_ids"], create_collate_fn(64)([dataset[0]])["input_ids"])


@pytest.mark.parametrize("form", ["store", "v1", "arrow"])
def test_two_workers_give_the_batches_of_none(tmp_path: Path, make: SimpleNamespace, form: str) -> None:
    getattr(make, form)(tmp_path / "data", make.samples(40, seed=2))
    dataset = Eagle3SampleFileDataset(tmp_path / "data")
    dataset[0]  # an open handle in the parent must not disturb the workers

    def batches(num_workers: int) -> list[dict]:
        sampler = PackBatchSampler(dataset.lengths, 64, seed=1)
        loader = DataLoader(
            dataset, batch_sampler=sampler, collate_fn=create_collate_fn(64), num_workers=num_workers
        )
        return [*loader, *(sampler.set_epoch(1) or loader)]

    alone, together = batches(0), batches(2)
    assert len(alone) == len(together) > 8
    for one, two in zip(alone, together, strict=True):
        assert one.keys() == two.keys()
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_spawned_workers_give_the_batches_of_none(store: Path) -> None:
    dataset = Eagle3SampleFileDataset(store)
    dataset[0]
    sampler = PackBatchSampler(dataset.lengths, 64, seed=1)
    context = multiprocessing.get_context("spawn")
    loaders = [
        DataLoader(
            dataset,
            batch_sampler=sampler,
            collate_fn=create_collate_fn(64),
            num_workers=n,
            multiprocessing_context=context if n else None,
        )
        for n in (0, 1)
    ]
    for one, two in zip(*loaders, strict=True):
        assert all(torch.equal(one[name], two[name]) for name in one)
