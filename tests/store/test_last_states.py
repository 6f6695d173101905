"""A store that keeps the last state only where it can be a target: what lies in it, and who refuses what."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.store.disk import estimate_bytes
from eagle3lab.store.index import read_index
from eagle3lab.store.inventory import take_inventory
from eagle3lab.store.last_states import kept_positions, num_kept, spread
from eagle3lab.store.manifest import read_manifest
from eagle3lab.store.merge import merge_parts, part_directory
from eagle3lab.store.reader import StoreReader

DTYPES = ["bfloat16", "float32", "float8_e4m3"]
LAST, SCALES, KEPT = "verifier_last_hidden_states", "verifier_last_scales", "verifier_last_kept"


def kept_by_hand(mask: tuple[int, ...]) -> list[bool]:
    return [p > 0 and bool(mask[p] or (p + 1 < len(mask) and mask[p + 1])) for p in range(len(mask))]


def supervised(fake: SimpleNamespace, path: Path, rows: Any = None, **changes: Any) -> Path:
    fake.write(path, rows or fake.rows(), fake.manifest(last_state_rows="supervised", **changes))
    return path


def unsupervised_rows(fake: SimpleNamespace) -> list[Any]:
    """Rows without any target between others; with small shards some hold no last state at all."""
    from eagle3lab.store.identity import row_id_of

    rows = []
    for i, row in enumerate(fake.rows(9)):
        mask = row.loss_mask if i % 3 == 0 else (1, *[0] * (len(row.input_ids) - 1))
        rows.append(replace(row, loss_mask=mask, row_id=row_id_of(row.input_ids, mask)))
    return rows


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([0, 0, 1, 1, 0, 0], [0, 1, 1, 1, 0, 0]),
        ([1, 0, 0, 0, 0, 1], [0, 0, 0, 0, 1, 1]),
        ([1, 1], [0, 1]),
        ([1], [0]),
        ([0, 0, 0], [0, 0, 0]),
    ],
)
def test_kept_are_the_supervised_tokens_and_the_one_before_each(mask: list[int], kept: list[int]) -> None:
    found = kept_positions(torch.tensor(mask, dtype=torch.uint8))
    assert found.dtype == torch.bool
    assert found.int().tolist() == kept
    assert num_kept(mask) == sum(kept)
    states = torch.randn(sum(kept), 3)
    whole = spread(states, found)
    assert torch.equal(whole[found], states)
    assert not whole[~found].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_kept_reads_as_from_a_store_of_all_and_the_rest_is_zero(
    tmp_path: Path, fake: SimpleNamespace, dtype: str
) -> None:
    fake.write(tmp_path / "all", fake.rows(), fake.manifest(dtype=dtype))
    whole = StoreReader(tmp_path / "all", verify="full")
    some = StoreReader(supervised(fake, tmp_path / "some", dtype=dtype), verify="full")
    assert torch.equal(some.token_counts(), whole.token_counts())
    for i, row in enumerate(fake.rows()):
        kept = torch.tensor(kept_by_hand(row.loss_mask))
        for columns in (None, [2, 0]):
            got, expected = some.read(i, columns), whole.read(i, columns)
            assert got.keys() == expected.keys()
            assert not got[LAST][~kept].any()
            expected[LAST][~kept] = 0
            assert all(torch.equal(got[name], expected[name]) for name in expected)
            raw, all_raw = some.read(i, columns, raw=True), whole.read(i, columns, raw=True)
            assert torch.equal(raw.pop(KEPT), kept)
            assert raw.keys() == all_raw.keys()
            for name, tensor in all_raw.items():
                wanted = tensor[kept] if name in (LAST, SCALES) else tensor
                assert torch.equal(raw[name].float(), wanted.float()), name


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_shard_holds_no_other_last_state(tmp_path: Path, fake: SimpleNamespace, dtype: str) -> None:
    store = supervised(fake, tmp_path / "store", dtype=dtype)
    rows = {row.row_id: row for row in fake.rows()}
    for entry in read_index(store)[0]:
        count = sum(sum(kept_by_hand(rows[row.row_id].loss_mask)) for row in entry.rows)
        with safe_open(store / entry.file, "pt") as file:
            assert file.get_slice(LAST).get_shape() == [count, fake.HIDDEN]
            assert file.get_slice("aux_hidden_states").get_shape()[0] == entry.num_tokens
            if dtype == "float8_e4m3":
                assert file.get_slice(SCALES).get_shape() == [count, 1]
    size = sum(sum(t.nbytes for t in load_file(f).values()) for f in (store / "shards").iterdir())
    tokens = sum(len(row.input_ids) for row in fake.rows())
    num_last = sum(num_kept(row.loss_mask) for row in fake.rows())
    assert size == estimate_bytes(tokens, fake.HIDDEN, 3, dtype, num_last) + 9 * tokens
    inventory = take_inventory(store)
    assert inventory.num_last_states == num_last
    assert any(f"where it can be a target: {num_last:,} tokens" in line for line in inventory.lines())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_and_shards_without_any_target_are_read(
    tmp_path: Path, fake: SimpleNamespace, dtype: str
) -> None:
    rows = unsupervised_rows(fake)
    manifest = fake.manifest(last_state_rows="supervised", dtype=dtype)
    fake.write(tmp_path / "store", rows, manifest, shard_tokens=1)
    reader = StoreReader(tmp_path / "store", verify="full")
    assert 0 in {row.num_last_states for row in reader.rows}
    for i, row in enumerate(rows):
        last = reader.read(i)[LAST]
        assert last.any(dim=-1).tolist() == kept_by_hand(row.loss_mask)


def test_the_manifest_and_the_shards_say_so_and_a_store_of_all_is_as_before(
    tmp_path: Path, fake: SimpleNamespace, store: Path
) -> None:
    some = supervised(fake, tmp_path / "some")
    manifest = json.loads((some / "manifest.json").read_text())
    assert (manifest["format_version"], manifest["last_state_rows"]) == (3, "supervised")
    with safe_open(some / "shards" / "00000.safetensors", "pt") as file:
        assert '"last_state_rows": "supervised"' in file.metadata()["eagle3lab-store"]
    values = json.loads((store / "manifest.json").read_text())
    assert values["format_version"] == 2
    assert "last_state_rows" not in values
    assert "num_last_states" not in (store / "index.jsonl").read_text()
    assert read_manifest(store).all_last_states


@pytest.mark.parametrize("change", [{"last_state_rows": "supervised"}, {"format_version": 3}])
def test_the_field_and_the_format_version_belong_together(store: Path, change: dict) -> None:
    file = store / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(IntegrityError, match="last_state_rows does not belong to format version"):
        read_manifest(store)


@pytest.mark.parametrize("stop_before", [1, None])
@pytest.mark.parametrize("old", ["all", "supervised"])
def test_a_store_is_not_continued_with_another_choice(
    tmp_path: Path, fake: SimpleNamespace, old: str, stop_before: int | None
) -> None:
    new = {"all": "supervised", "supervised": "all"}[old]
    rows = fake.rows()
    fake.write(tmp_path / "store", rows, fake.manifest(last_state_rows=old), stop_before=stop_before)
    before = fake.tree(tmp_path / "store")
    with pytest.raises(UserError, match=rf"last_state_rows \(extract.last_state\).*'{old}'.*'{new}' as now"):
        fake.write(tmp_path / "store", rows, fake.manifest(last_state_rows=new))
    assert fake.tree(tmp_path / "store") == before


def test_parts_join_to_the_store_of_one_run(tmp_path: Path, fake: SimpleNamespace) -> None:
    whole = supervised(fake, tmp_path / "whole")
    parts = [part_directory(tmp_path / "store", part, 2) for part in range(2)]
    for part, path in enumerate(parts):
        supervised(fake, path, part=part, num_parts=2)
    merge_parts(parts, tmp_path / "joined")
    assert fake.tree(tmp_path / "joined") == fake.tree(whole)
    other = tmp_path / "other"
    fake.write(other, fake.rows(), fake.manifest(part=1, num_parts=2))
    with pytest.raises(UserError, match="another last_state_rows"):
        merge_parts([parts[0], other], tmp_path / "mixed")


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_wrong_state_that_is_stored_is_found_when_it_is_read(
    tmp_path: Path, fake: SimpleNamespace, value: float
) -> None:
    store = supervised(fake, tmp_path / "store")
    shard = store / "shards" / "00000.safetensors"
    with safe_open(shard, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(shard).items()}
    tensors[LAST][0] = value
    save_file(tensors, shard, metadata=metadata)
    with pytest.raises(IntegrityError, match="last state"):
        StoreReader(store).read(0)


@pytest.mark.parametrize("value", [0.0, float("inf")])
def test_a_wrong_state_is_refused_by_the_writer_also_where_it_would_not_be_kept(
    tmp_path: Path, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    row = next(row for row in fake.rows() if not all(kept_by_hand(row.loss_mask)[1:]))
    row_, aux, last, ids = fake.states(row, torch.bfloat16)
    last[kept_by_hand(row.loss_mask).index(False, 1)] = value
    monkeypatch.setitem(fake.write.__globals__, "make_states", lambda *_: (row_, aux, last, ids))
    with pytest.raises(IntegrityError, match="last state"):
        fake.write(tmp_path / "store", [row], fake.manifest(last_state_rows="supervised"))


def test_a_count_that_is_not_the_masks_is_refused(tmp_path: Path, fake: SimpleNamespace) -> None:
    reader = StoreReader(supervised(fake, tmp_path / "store"))
    record = reader.rows[0]
    reader.rows[0] = replace(record, num_last_states=record.num_last_states + 1)
    expected = f"{record.num_last_states}; expected {record.num_last_states + 1} as indexed"
    with pytest.raises(IntegrityError, match=re.escape(expected)):
        reader.read(0)


def test_an_index_of_other_counts_is_not_continued(tmp_path: Path, fake: SimpleNamespace) -> None:
    """Two counts that are wrong by one in either direction leave the shard's shape right."""
    manifest = fake.manifest(last_state_rows="supervised")
    fake.write(tmp_path / "store", fake.rows(), manifest, stop_before=1)
    index = tmp_path / "store" / "index.jsonl"
    entry = json.loads(index.read_text())
    entry["rows"][0]["num_last_states"] -= 1
    entry["rows"][1]["num_last_states"] += 1
    index.write_text(json.dumps(entry, separators=(",", ":")) + "\n")
    with pytest.raises(IntegrityError, match="does not hold its planned rows"):
        fake.write(tmp_path / "store", fake.rows(), manifest)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_it_resumes_to_the_same_bytes(tmp_path: Path, fake: SimpleNamespace, dtype: str) -> None:
    manifest = fake.manifest(last_state_rows="supervised", dtype=dtype)
    fake.write(tmp_path / "whole", fake.rows(), manifest)
    fake.write(tmp_path / "store", fake.rows(), manifest, stop_before=2)
    fake.write(tmp_path / "store", fake.rows(), manifest)
    assert fake.tree(tmp_path / "store") == fake.tree(tmp_path / "whole")
