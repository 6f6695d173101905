"""Samples and packs of a store that keeps the last state only where a rule of supervision can ask for it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError
from eagle3lab.config.schema import Supervision
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.raw import StateCheck, dequantize_batch, states_are_sound
from eagle3lab.data.shift import LAST_KEPT
from eagle3lab.data.supervision import apply_supervision
from eagle3lab.draft.ttt import supervision_masks
from eagle3lab.store.fp8 import FP8
from eagle3lab.store.last_states import kept_positions

LAST = "verifier_last_hidden_states"
PACKS = [[3, 0, 7], [5], [1, 2, 4, 6]]
DTYPES = ["bfloat16", "float8_e4m3"]


@pytest.fixture
def stores(tmp_path: Path, make: SimpleNamespace, request: pytest.FixtureRequest) -> SimpleNamespace:
    """The same rows twice, with all last states and with those that can be targets."""
    for rows in ("all", "supervised"):
        make.store(tmp_path / rows, make.samples(), dtype=request.param, last_state_rows=rows)
    return SimpleNamespace(all=tmp_path / "all", some=tmp_path / "supervised", dtype=request.param)


def packs(path: Path, **options: Any) -> list[dict[str, Any]]:
    data = Eagle3SampleFileDataset(path, **options)
    return [create_collate_fn(64)([data[row] for row in rows]) for rows in PACKS]


def test_kept_is_exactly_what_some_step_under_some_rule_has_as_its_target() -> None:
    """By way of the training masks: the target of step k at a sample's column j is the last state of j + k + 1."""
    generator = torch.Generator().manual_seed(0)
    for length in (*range(1, 9), 40):
        for _ in range(30):
            mask = torch.randint(2, (length,), generator=generator)
            asked = torch.zeros(length, dtype=torch.bool)
            for rule in Supervision:
                counted = apply_supervision(mask, rule)[1:]
                for k, columns in enumerate(supervision_masks(counted, torch.zeros(length - 1), 3)):
                    asked[columns.nonzero() + k + 1] = True
            assert torch.equal(kept_positions(mask), asked)


@pytest.mark.parametrize("rule", list(Supervision))
@pytest.mark.parametrize("stores", ["bfloat16"], indirect=True)
def test_every_supervised_position_of_a_sample_has_its_state(
    stores: SimpleNamespace, make: SimpleNamespace, rule: Supervision
) -> None:
    data = Eagle3SampleFileDataset(stores.some, supervision=rule)
    for i, sample in enumerate(make.samples()):
        item = data[i]
        wanted = sample.states[1:, 3]
        assert item[LAST].shape == wanted.shape
        assert torch.equal(item[LAST][item["loss_mask"]], wanted[item["loss_mask"]])


@pytest.mark.parametrize("rule", list(Supervision))
@pytest.mark.parametrize("stores", DTYPES, indirect=True)
@pytest.mark.parametrize("layers", [None, [2, 5]])
def test_a_pack_is_that_of_a_store_of_all_but_for_states_that_nothing_reads(
    stores: SimpleNamespace, layers: list[int] | None, rule: Supervision
) -> None:
    options = {"supervision": rule, "aux_layer_ids": layers}
    plain = packs(stores.some, **options)
    raw = packs(stores.some, raw=True, **options)
    for batch, decoded, expected in zip(
        plain, map(dequantize_batch, raw), packs(stores.all, **options), strict=True
    ):
        kept = decoded.pop(LAST_KEPT)
        assert kept.dtype == torch.bool
        assert bool((kept | ~expected["loss_mask"]).all())
        assert bool((~kept | (expected["document_ids"] >= 0)).all())
        expected[LAST] = torch.where(kept[..., None], expected[LAST], 0)
        for found in (batch, decoded):
            assert found.keys() == expected.keys()
            for name, tensor in expected.items():
                assert found[name].dtype == tensor.dtype
                assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("stores", DTYPES, indirect=True)
def test_a_raw_row_carries_nothing_that_is_not_stored(stores: SimpleNamespace, make: SimpleNamespace) -> None:
    data = Eagle3SampleFileDataset(stores.some, raw=True)
    for i, sample in enumerate(make.samples()):
        item = data[i]
        kept = kept_positions(sample.mask)[1:]
        assert torch.equal(item[LAST_KEPT], kept)
        assert len(item[LAST]) == int(kept.sum())
        assert len(item["hidden_states"]) == len(kept)
        if stores.dtype == "float8_e4m3":
            assert item[LAST].dtype == FP8
            assert item[f"{LAST}_scales"].shape == (int(kept.sum()), 1)


@pytest.mark.parametrize("stores", DTYPES, indirect=True)
def test_states_that_are_not_stored_are_no_damage(stores: SimpleNamespace) -> None:
    looked_at: list[int] = []
    check = StateCheck(looked_at.append)
    for batch in packs(stores.some, raw=True):
        assert bool((batch[LAST].float() == 0).all(dim=-1)[batch["document_ids"] >= 0].any())
        check.add(dequantize_batch(batch))
    check.finish()
    assert looked_at == []


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("stores", DTYPES, indirect=True)
def test_a_stored_state_that_is_damaged_is_named(stores: SimpleNamespace, value: float) -> None:
    shard = stores.some / "shards" / "00000.safetensors"
    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    tensors[LAST][3] = value
    save_file(tensors, shard, metadata=metadata)
    data = Eagle3SampleFileDataset(stores.some, raw=True)
    check = StateCheck(data.check_row)
    for rows in PACKS:
        check.add(dequantize_batch(create_collate_fn(64)([data[row] for row in rows])))
    with pytest.raises(IntegrityError, match="last state"):
        check.finish()


@pytest.mark.parametrize("stores", ["bfloat16"], indirect=True)
def test_a_zero_state_in_a_pack_counts_where_the_store_keeps_one_alone(stores: SimpleNamespace) -> None:
    (batch, *_) = packs(stores.some, raw=True)
    assert bool(states_are_sound(batch))
    at = int(batch[LAST_KEPT][0].nonzero()[0])
    batch[LAST][0, at] = 0
    assert not bool(states_are_sound(batch))
    (batch, *_) = packs(stores.some, raw=True)
    batch["hidden_states"][0, int((~batch[LAST_KEPT][0]).nonzero()[0])] = 0  # the aux states are everywhere
    assert not bool(states_are_sound(batch))
