"""fp8 e4m3 with per-token scales: size, error, raw and de-quantised reading."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError
from eagle3lab.data import Eagle3SampleFileDataset
from eagle3lab.store.disk import estimate_bytes
from eagle3lab.store.fp8 import dequantize, quantize
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest, VerifierIdentity
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter

WIDE, LAYERS = 576, (2, 15, 27)


def e4m3_values() -> np.ndarray:
    """Every finite non-negative e4m3 number, from the format's definition: bias 7, 3 bits of mantissa."""
    subnormal = [m / 8 * 2.0**-6 for m in range(8)]
    normal = [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)]
    return np.array(subnormal + normal)


def wide_states(length: int, seed: int) -> torch.Tensor:
    """[T, 4, WIDE] like a verifier's: layers grow, and a few dimensions are hundreds of times the others."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(length, 4, WIDE, generator=generator) * torch.tensor([0.5, 2, 8, 20])[:, None]
    states[:, 1:, 7] *= 300
    states[0, :, 3] = 4000
    return states.to(torch.bfloat16)


def write_wide(path: Path, dtype: str) -> list[torch.Tensor]:
    rows, states = [], {}
    for i, length in enumerate((60, 33, 97, 12)):
        ids = [(7 * i + k) % 97 for k in range(length)]
        mask = [int(k > 5) for k in range(length)]
        row_id = row_id_of(ids, mask)
        rows.append(
            SimpleNamespace(
                row_id=row_id, conversation_id=f"c{i}", source=f"s:{i}", split="train", input_ids=ids,
                loss_mask=mask,
            )
        )  # fmt: skip
        states[row_id] = wide_states(length, i)
    manifest = Manifest(
        verifier=VerifierIdentity("LlamaForCausalLM", "c", "w", WIDE, 30, 97, "wide"),
        tokenizer_hash="t", template_hash="j", template_args_hash="a", layer_ids=LAYERS, dtype=dtype,
        engine={"name": "hf"},
    )  # fmt: skip
    with StoreWriter(path, manifest, rows, 100) as writer:
        for number, shard in writer.pending():
            writer.write_shard(
                number,
                [
                    (row, s[:, :3].flatten(1), s[:, 3].contiguous(), torch.tensor(row.input_ids))
                    for row in shard
                    for s in [states[row.row_id]]
                ],
            )
        writer.finish()
    return [states[row.row_id] for row in rows]


def test_the_states_take_half_the_bytes_of_bf16_and_keep_two_digits(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_wide(tmp_path / "bf16", "bfloat16")
    states = write_wide(tmp_path / "fp8", "float8_e4m3")
    sizes = {
        name: sum(file.stat().st_size for file in (tmp_path / name / "shards").iterdir())
        for name in ("bf16", "fp8")
    }
    headers = 4096  # of the few small shards here; a shard of 16384 tokens has one per 38 MB
    ratio = sizes["fp8"] / sizes["bf16"]
    estimated = estimate_bytes(1000, WIDE, 3, "float8_e4m3") / estimate_bytes(1000, WIDE, 3, "bfloat16")
    assert ratio <= 0.52
    assert estimated == pytest.approx(0.5 + 4 / (2 * WIDE))
    assert sizes["fp8"] - headers <= estimate_bytes(202, WIDE, 3, "float8_e4m3") + 202 * 9
    reader = StoreReader(tmp_path / "fp8", verify="full")
    errors = []
    for i, wanted in enumerate(states):
        row = reader.read(i)
        got = torch.cat([row["aux_hidden_states"], row["verifier_last_hidden_states"]], dim=1)
        assert got.dtype == torch.bfloat16
        got = got.float().unflatten(1, (4, WIDE))
        errors.append((got - wanted.float()).norm(dim=-1) / wanted.float().norm(dim=-1))
    per_layer = torch.cat(errors)  # shape: [tokens, 4]
    with capsys.disabled():
        print(f"\nfp8 store: {ratio:.4f} of the bytes of bf16; relative error of a state, mean and worst:")
        for name, column in zip([*map(str, LAYERS), "last"], per_layer.unbind(1), strict=True):
            print(f"  layer {name:>4}: {float(column.mean()):.4f} {float(column.max()):.4f}")
    assert float(per_layer.mean()) <= 0.03
    assert float(per_layer.max()) <= 0.0625


def test_quantising_rounds_every_value_to_the_nearest_of_the_format() -> None:
    states = wide_states(20, 3).flatten(1)
    values, scales = quantize(states, WIDE)
    table = e4m3_values()
    for slot in range(4):
        given = states.float().numpy()[:, slot * WIDE : (slot + 1) * WIDE]
        scale = np.abs(given).max(axis=1, keepdims=True) / 448
        np.testing.assert_allclose(scales[:, slot].numpy(), scale[:, 0], rtol=1e-6)
        scaled = np.abs(given / scale)
        nearest = np.abs(scaled[..., None] - table).min(axis=-1)
        stored = np.abs(values.float().numpy()[:, slot * WIDE : (slot + 1) * WIDE])
        np.testing.assert_allclose(np.abs(stored - scaled), nearest, rtol=1e-3, atol=1e-5)


def test_quantising_what_was_quantised_changes_nothing_but_the_last_bit_of_bf16() -> None:
    once = dequantize(*quantize(wide_states(20, 3).flatten(1), WIDE), WIDE)
    twice = dequantize(*quantize(once, WIDE), WIDE)
    torch.testing.assert_close(twice, once, rtol=2**-7, atol=0)


@pytest.mark.parametrize("scale", [1e-38, 1e-30, 1e30, 3e38])
def test_extreme_vectors_stay_finite_and_non_zero(scale: float) -> None:
    states = (torch.linspace(-1, 1, 8) * scale).to(torch.bfloat16).repeat(3, 1)
    back = dequantize(*quantize(states, 8), 8)
    assert bool(back.isfinite().all())
    assert bool((back != 0).any(dim=-1).all())


def test_raw_reading_gives_what_lies_in_the_file(tmp_path: Path) -> None:
    write_wide(tmp_path / "fp8", "float8_e4m3")
    reader = StoreReader(tmp_path / "fp8")
    for i in range(len(reader)):
        for columns in (None, [1], [2, 0]):
            raw, plain = reader.read(i, columns, raw=True), reader.read(i, columns)
            assert raw["aux_hidden_states"].dtype == raw["verifier_last_hidden_states"].dtype
            assert raw["aux_hidden_states"].dtype == torch.float8_e4m3fn
            assert raw["aux_scales"].shape == (len(raw["input_ids"]), len(columns or LAYERS))
            back = dequantize(raw["aux_hidden_states"], raw["aux_scales"], WIDE)
            assert torch.equal(back, plain["aux_hidden_states"])
            last = dequantize(raw["verifier_last_hidden_states"], raw["verifier_last_scales"], WIDE)
            assert torch.equal(last, plain["verifier_last_hidden_states"])
            assert raw["aux_hidden_states"].untyped_storage().nbytes() == raw["aux_hidden_states"].nbytes


def test_the_dataset_reads_it_like_any_store(tmp_path: Path) -> None:
    states = write_wide(tmp_path / "fp8", "float8_e4m3")
    dataset = Eagle3SampleFileDataset(tmp_path / "fp8", aux_layer_ids=[2, 27])
    for i, wanted in enumerate(states):
        item = dataset[i]
        assert item["hidden_states"].dtype == torch.bfloat16
        near = wanted[:-1, [0, 2]].flatten(1).float()
        assert float((item["hidden_states"].float() - near).norm() / near.norm()) < 0.04
        last = wanted[1:, 3].float()
        assert float((item["verifier_last_hidden_states"].float() - last).norm() / last.norm()) < 0.04


def test_the_manifest_and_the_shards_say_so(tmp_path: Path, fake: SimpleNamespace) -> None:
    fake.write(tmp_path / "store", fake.rows(), fake.manifest(dtype="float8_e4m3"))
    assert json.loads((tmp_path / "store" / "manifest.json").read_text())["dtype"] == "float8_e4m3"
    with safe_open(tmp_path / "store" / "shards" / "00000.safetensors", "pt") as file:
        assert file.get_slice("aux_hidden_states").get_dtype() == "F8_E4M3"
        assert file.get_slice("aux_scales").get_shape()[1] == 3
        assert file.get_slice("verifier_last_scales").get_shape()[1] == 1


def test_an_fp8_store_resumes_to_the_same_bytes(tmp_path: Path, fake: SimpleNamespace) -> None:
    manifest = fake.manifest(dtype="float8_e4m3")
    fake.write(tmp_path / "whole", fake.rows(), manifest)
    fake.write(tmp_path / "store", fake.rows(), manifest, stop_before=2)
    fake.write(tmp_path / "store", fake.rows(), manifest)
    assert fake.tree(tmp_path / "store") == fake.tree(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("aux_scales", 0.0, "1 scales are not finite and positive"),
        ("aux_scales", -1.0, "1 scales are not finite and positive"),
        ("verifier_last_scales", float("nan"), "verifier_last_scales: 1 scales"),
        ("aux_hidden_states", float("nan"), "1 NaN in layer 2"),
    ],
)
def test_damaged_scales_and_values_are_found_when_the_row_is_read(
    tmp_path: Path, fake: SimpleNamespace, name: str, value: float, message: str
) -> None:
    fake.write(tmp_path / "store", fake.rows(), fake.manifest(dtype="float8_e4m3"))
    shard = tmp_path / "store" / "shards" / "00000.safetensors"
    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    tensors = {key: tensor.clone() for key, tensor in load_file(shard).items()}
    tensors[name][0, 0] = value
    save_file(tensors, shard, metadata=metadata)
    with pytest.raises(IntegrityError, match=message):
        StoreReader(tmp_path / "store").read(0)
