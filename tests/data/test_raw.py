"""Packs as they lie in the store, and what the device makes of them: the same as the reader on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.raw import StateCheck, dequantize_batch
from eagle3lab.store.fp8 import FP8, dequantize

ROWS, LAYERS = [3, 0, 7], [2, 5]


def pack(path: Path, *, raw: bool, aux_layer_ids: list[int] | None = None) -> dict[str, Any]:
    data = Eagle3SampleFileDataset(path, raw=raw, aux_layer_ids=aux_layer_ids)
    return create_collate_fn(64)([data[row] for row in ROWS])


def fp8_store(path: Path, make: SimpleNamespace) -> Path:
    make.store(path, make.samples(), dtype="float8_e4m3")
    return path


def edit_shard(path: Path, edit: Callable[[dict], Any]) -> None:
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata=metadata)


@pytest.mark.parametrize("layers", [None, LAYERS])
def test_an_fp8_pack_becomes_bit_for_bit_what_the_reader_decodes(
    tmp_path: Path, make: SimpleNamespace, layers: list[int] | None
) -> None:
    store = fp8_store(tmp_path / "fp8", make)
    raw = pack(store, raw=True, aux_layer_ids=layers)
    slots = len(layers or make.LAYERS)
    assert raw["hidden_states"].dtype == raw["verifier_last_hidden_states"].dtype == FP8
    assert raw["hidden_states_scales"].shape == (1, 64, slots)
    assert raw["verifier_last_hidden_states_scales"].shape == (1, 64, 1)
    decoded, expected = dequantize_batch(raw), pack(store, raw=False, aux_layer_ids=layers)
    assert decoded.keys() == expected.keys()
    for name, tensor in expected.items():
        assert decoded[name].dtype == tensor.dtype
        assert torch.equal(decoded[name], tensor), name


def test_a_pack_of_another_store_is_the_same_raw_or_not(store: Path) -> None:
    raw, expected = pack(store, raw=True), pack(store, raw=False)
    assert dequantize_batch(raw) is raw
    assert all(torch.equal(raw[name], tensor) for name, tensor in expected.items())


def test_every_fp8_code_is_scaled_in_fp32_and_rounded_once() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(FP8)
    scales = torch.logspace(-37, 30, 997)[:, None]
    values = codes.expand(997, 256).contiguous()
    found = dequantize(values, scales, 256)
    expected = (codes.double()[None] * scales.double()).float().to(torch.bfloat16)
    # a double product of an fp32 and a 4 bit number is exact, so its fp32 rounding is the fp32 product
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert torch.equal(found.isnan(), expected.isnan())


def test_raw_rows_are_views_of_the_mapped_shard_and_leave_no_private_page(tmp_path: Path, make: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    samples = [
        type(s)(s.ids, s.mask, torch.randn(s.states.shape, generator=generator).bfloat16())
        for s in make.samples(12)
    ]
    make.store(tmp_path / "store", samples, shard_tokens=10_000)
    data = Eagle3SampleFileDataset(tmp_path / "store", raw=True)
    first, second = data[0], data[1]
    shared = {row["hidden_states"].untyped_storage().data_ptr() for row in (first, second)}
    assert len(shared) == 1
    create_collate_fn(64)([first, second])
    maps = Path("/proc/self/smaps").read_text().split("00000.safetensors")[1:]
    assert maps
    assert all("Private_Dirty:         0 kB" in part.split("VmFlags")[0] for part in maps)


def test_raw_states_are_neither_cast_nor_transformed_on_the_host(store: Path) -> None:
    with pytest.raises(ValueError, match="on the device"):
        Eagle3SampleFileDataset(store, raw=True, hidden_states_dtype=torch.float32)


def spoil(name: str, value: float) -> Callable[[dict], Any]:
    return lambda tensors: tensors[name][4].fill_(value)


@pytest.mark.parametrize(
    ("dtype", "name", "value", "message"),
    [
        ("bfloat16", "aux_hidden_states", float("nan"), "8 NaN in layer 2"),
        ("bfloat16", "verifier_last_hidden_states", float("inf"), "8 Inf in last state"),
        ("bfloat16", "aux_hidden_states", 0.0, "1 of .* positions all zero in layer 2"),
        ("float8_e4m3", "aux_hidden_states", float("nan"), "8 NaN in layer 2"),
        ("float8_e4m3", "verifier_last_hidden_states", 0.0, "all zero in last state"),
    ],
)
def test_a_damaged_state_of_a_pack_is_named_when_the_device_is_asked(
    tmp_path: Path, make: SimpleNamespace, dtype: str, name: str, value: float, message: str
) -> None:
    make.store(tmp_path / "store", make.samples(), dtype=dtype)
    shard = tmp_path / "store" / "shards" / "00000.safetensors"
    data = Eagle3SampleFileDataset(tmp_path / "store", raw=True)
    check = StateCheck(data.check_row)
    collate = create_collate_fn(64)
    packs = [[5, 6], [0, 1, 2], [7]]
    for rows in packs:
        check.add(dequantize_batch(collate([data[row] for row in rows])))
    check.finish()  # sound

    edit_shard(shard, spoil(name, value))
    damaged = Eagle3SampleFileDataset(tmp_path / "store", raw=True)
    check = StateCheck(damaged.check_row)
    for rows in packs:
        check.add(dequantize_batch(collate([damaged[row] for row in rows])))
    with pytest.raises(IntegrityError, match=rf"talk\.jsonl:\d+.*{message}|{message}"):
        check.finish()
    check.finish()  # asked once, said once


def test_a_wrong_scale_is_found_on_the_host(tmp_path: Path, make: SimpleNamespace) -> None:
    store = fp8_store(tmp_path / "fp8", make)
    edit_shard(store / "shards" / "00000.safetensors", spoil("aux_scales", -1.0))
    data = Eagle3SampleFileDataset(store, raw=True)
    with pytest.raises(IntegrityError, match="not finite and positive"):
        [data[row] for row in range(3)]


def test_a_norm_that_overflows_is_no_damage(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = make.samples()
    samples[0].states[:] = 3e38
    make.store(tmp_path / "store", samples)
    data = Eagle3SampleFileDataset(tmp_path / "store", raw=True)
    looked_at: list[int] = []
    check = StateCheck(lambda row: (looked_at.append(row), data.check_row(row)))
    check.add(create_collate_fn(64)([data[1], data[0]]))
    check.finish()
    assert looked_at == [1, 0]


def test_sound_packs_are_not_read_again_whatever_their_padding(store: Path) -> None:
    data = Eagle3SampleFileDataset(store, raw=True)
    looked_at: list[int] = []
    check = StateCheck(looked_at.append)
    for rows in ([0], [1, 2]):
        check.add(create_collate_fn(128)([data[row] for row in rows]))
    check.finish()
    assert looked_at == []
