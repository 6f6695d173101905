"""Reading back: values, slices, checks, and life in worker processes."""

from __future__ import annotations

import json
import multiprocessing
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import eagle3lab.store.reader as reader_module
from eagle3lab.__main__ import main
from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.store.reader import StoreReader


@pytest.mark.parametrize("name", ["index.jsonl", "token_counts.safetensors", "trained_on.keys"])
def test_a_directory_in_place_of_a_file_is_one_message(
    name: str, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / name).unlink()
    (store / name).mkdir()
    assert main(["store", "verify", str(store)]) == 2
    assert f"{store / name} (Is a directory); expected a file" in capsys.readouterr().err


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_row_reads_as_it_was_written(tmp_path: Path, fake: SimpleNamespace, dtype: torch.dtype) -> None:
    rows = fake.rows(30, seed=3)
    manifest = fake.write(
        tmp_path, rows, fake.manifest(dtype=str(dtype).removeprefix("torch.")), shard_tokens=50
    )
    reader = StoreReader(tmp_path, verify="full")
    assert len(reader) == 30
    assert reader.manifest == manifest
    for i, row in enumerate(rows):
        _, aux, last, ids = fake.states(row, dtype)
        data = reader.read(i)
        assert data["input_ids"].dtype == torch.int64
        assert torch.equal(data["input_ids"], ids)
        assert data["loss_mask"].tolist() == list(row.loss_mask)
        assert data["aux_hidden_states"].dtype == data["verifier_last_hidden_states"].dtype == dtype
        assert torch.equal(data["aux_hidden_states"], aux)
        assert torch.equal(data["verifier_last_hidden_states"], last)
        record = reader.rows[i]
        assert (record.row_id, record.conversation_id) == (row.row_id, row.conversation_id)
        assert (record.split, record.source, record.length) == (row.split, row.source, len(row.input_ids))
        assert record.supervised == sum(row.loss_mask)
        assert reader.read_mask(i).tolist() == list(row.loss_mask)


@pytest.mark.parametrize("columns", [[0], [2], [0, 2], [2, 0], [0, 1, 2]])
def test_columns_select_aux_layers_in_the_given_order(
    store: Path, fake: SimpleNamespace, columns: list[int]
) -> None:
    reader = StoreReader(store)
    for i, row in enumerate(fake.rows()):
        aux = fake.states(row, torch.bfloat16)[1].view(len(row.input_ids), 3, fake.HIDDEN)
        expected = torch.cat([aux[:, c] for c in columns], dim=-1)
        assert torch.equal(reader.read(i, columns)["aux_hidden_states"], expected)


def test_a_row_owns_its_memory(store: Path) -> None:
    """A view would send the whole shard through a worker's pipe, and writing to it would spoil later reads."""
    reader = StoreReader(store)
    first = reader.read(1)
    for tensor in first.values():
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    expected = {name: tensor.clone() for name, tensor in first.items()}
    first["aux_hidden_states"].zero_()
    again = reader.read(1)
    assert all(torch.equal(again[name], expected[name]) for name in expected)


def test_splits_and_token_counts_are_those_of_the_rows(store: Path, fake: SimpleNamespace) -> None:
    rows = fake.rows()
    reader = StoreReader(store)
    assert reader.indices("train") == [i for i, row in enumerate(rows) if row.split == "train"]
    assert reader.indices("validation") == [i for i, row in enumerate(rows) if row.split == "validation"]
    expected = [0] * fake.VOCAB
    for row in rows:
        for token, mask in zip(row.input_ids, row.loss_mask, strict=True):
            expected[token] += mask if row.split == "train" else 0
    counts = reader.token_counts()
    assert counts.dtype == torch.int64
    assert counts.tolist() == expected


def test_token_counts_of_other_rows_are_refused(store: Path) -> None:
    counts = load_file(store / "token_counts.safetensors")["token_counts"]
    counts[0] += 1
    save_file({"token_counts": counts}, store / "token_counts.safetensors")
    with pytest.raises(IntegrityError, match="token_counts"):
        StoreReader(store).token_counts()


def test_a_missing_store_names_the_command_that_makes_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        StoreReader(tmp_path / "nothing")
    assert f"try: python extract.py store={tmp_path / 'nothing'}" in str(caught.value)
    with pytest.raises(UserError, match=r"try: python extract\.py model=qwen3_8b data=sharegpt"):
        StoreReader(tmp_path, extract_command="python extract.py model=qwen3_8b data=sharegpt")


def test_an_unfinished_store_is_not_read(tmp_path: Path, fake: SimpleNamespace) -> None:
    fake.write(tmp_path, fake.rows(), fake.manifest(), stop_before=2)
    with pytest.raises(UserError, match=r"not finished[\s\S]*python extract\.py"):
        StoreReader(tmp_path)


def test_any_flipped_byte_of_a_shard_is_found_by_a_full_check(store: Path, flip_byte: Callable) -> None:
    shard = store / "shards" / "00001.safetensors"
    size = shard.stat().st_size
    for at in (size - 1, size // 2, size // 3):
        flip_byte(shard, at)
        with pytest.raises(IntegrityError, match=r"00001\.safetensors: sha256"):
            StoreReader(store, verify="full")
        flip_byte(shard, at)
    StoreReader(store, verify="full")


def test_a_changed_token_or_mask_is_found_when_the_row_is_read(store: Path) -> None:
    shard = store / "shards" / "00000.safetensors"
    for name in ("input_ids", "loss_mask"):
        original = shard.read_bytes()
        edit_shard(shard, lambda tensors, name=name: tensors[name].__setitem__(0, tensors[name][0] ^ 1))
        reader = StoreReader(store)
        with pytest.raises(IntegrityError, match=r"talk\.jsonl:1.*row id"):
            reader.read(0)
        shard.write_bytes(original)


def test_nan_or_zero_states_are_found_when_the_row_is_read(store: Path) -> None:
    shard = store / "shards" / "00000.safetensors"
    original = shard.read_bytes()
    edit_shard(shard, lambda tensors: tensors["aux_hidden_states"][1].fill_(float("nan")))
    with pytest.raises(IntegrityError, match="8 NaN in layer 2"):
        StoreReader(store).read(0)
    shard.write_bytes(original)
    edit_shard(shard, lambda tensors: tensors["verifier_last_hidden_states"][1].zero_())
    with pytest.raises(IntegrityError, match="all zero in last state"):
        StoreReader(store).read(0)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("loss_mask"), "loss_mask"),
        (lambda t: t.update(input_ids=t["input_ids"].int()), "I32"),
        (lambda t: t.update(aux_hidden_states=t["aux_hidden_states"][:, :8].clone()), "aux_hidden_states"),
        (lambda t: t.update(verifier_last_hidden_states=t["verifier_last_hidden_states"].float()), "F32"),
        (lambda t: t.update(extra=torch.zeros(1)), "extra"),
    ],
)
def test_a_shard_of_another_form_is_refused_at_opening(store: Path, edit: Callable, message: str) -> None:
    edit_shard(store / "shards" / "00000.safetensors", edit)
    with pytest.raises(IntegrityError, match=message):
        StoreReader(store)


def test_a_cut_missing_or_exchanged_shard_is_refused_at_opening(store: Path) -> None:
    first, second = store / "shards" / "00000.safetensors", store / "shards" / "00001.safetensors"
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(one[:-1])
    with pytest.raises(IntegrityError, match="cannot be read"):
        StoreReader(store)
    first.unlink()
    with pytest.raises(IntegrityError, match="cannot be read"):
        StoreReader(store)
    first.write_bytes(two)
    second.write_bytes(one)
    with pytest.raises(IntegrityError, match="origin"):
        StoreReader(store)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda text: text[: text.rindex('{"file"')], "num_rows"),
        (lambda text: text[:-3], "torn"),
        (lambda text: text.replace('"split":"validation"', '"split":"train"', 1), "planned_rows_hash"),
        (lambda text: text.replace('"supervised":', '"supervised":1', 1), "num_supervised"),
    ],
)
def test_an_index_that_is_not_the_manifests_is_refused(store: Path, edit: Callable, message: str) -> None:
    index = store / "index.jsonl"
    index.write_text(edit(index.read_text()))
    with pytest.raises(IntegrityError, match=message):
        StoreReader(store)


def test_an_index_cannot_lead_outside_the_store(store: Path) -> None:
    index = store / "index.jsonl"
    index.write_text(index.read_text().replace("shards/00000", "../shards/00000", 1))
    with pytest.raises(IntegrityError, match="line 1 is damaged"):
        StoreReader(store)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"format_version": 3}, UserError, "format version"),
        ({"format": "other"}, IntegrityError, "not the manifest"),
        ({"last_state": "post_norm"}, IntegrityError, "post_norm"),
        ({"layer_convention": "input_of_layer"}, IntegrityError, "input_of_layer"),
        ({"dtype": "int4"}, IntegrityError, "int4"),
        ({"unknown": 1}, IntegrityError, "unknown"),
        ({"num_tokens": 1}, IntegrityError, "changed after it was written"),
        ({"tokenizer_hash": "other"}, IntegrityError, "changed after it was written"),
        ({"sha256": None}, IntegrityError, "changed after it was written"),
    ],
)
def test_a_manifest_of_another_meaning_is_refused(
    store: Path, change: dict, error: type, message: str
) -> None:
    file = store / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(error, match=message):
        StoreReader(store)


def test_a_manifest_that_is_no_json_is_refused(store: Path) -> None:
    for text in ("", "[]", "{", "null", '{"format": "eagle3lab-store"}'):
        (store / "manifest.json").write_text(text)
        with pytest.raises(IntegrityError, match="not the manifest"):
            StoreReader(store)


def test_pickling_drops_open_shards_and_reads_the_same(store: Path) -> None:
    reader = StoreReader(store)
    expected = [reader.read(i) for i in range(len(reader))]
    copy = pickle.loads(pickle.dumps(reader))
    for i, data in enumerate(expected):
        assert all(torch.equal(copy.read(i)[name], tensor) for name, tensor in data.items())


def _sums(reader: StoreReader, answers: Any) -> None:
    answers.put([float(reader.read(i)["aux_hidden_states"].float().sum()) for i in range(len(reader))])


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_open_reader_works_in_a_child_process(store: Path, method: str) -> None:
    reader = StoreReader(store)
    expected = [float(reader.read(i)["aux_hidden_states"].float().sum()) for i in range(len(reader))]
    if method == "spawn":  # what spawn does with an argument, without the seconds of a fresh interpreter
        assert [
            float(pickle.loads(pickle.dumps(reader)).read(0)["aux_hidden_states"].float().sum())
        ] == expected[:1]
        return
    context = multiprocessing.get_context(method)
    answers = context.Queue()
    child = context.Process(target=_sums, args=(reader, answers))
    child.start()
    assert answers.get(timeout=30) == expected
    child.join()


def test_many_shards_are_read_without_open_files_and_with_few_mappings(
    tmp_path: Path, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "_MAPPED_SHARDS", 8)
    rows = fake.rows(40)
    fake.write(tmp_path, rows, fake.manifest(), shard_tokens=1)
    reader = StoreReader(tmp_path)
    assert reader.rows[-1].shard == 39
    for i in [*range(40), *range(39, -1, -1), 0, 39, 0]:
        assert reader.read(i)["input_ids"].tolist() == list(rows[i].input_ids)
    assert len(reader._shards) <= 8
    assert Path("/proc/self/maps").read_text().count(str(tmp_path)) <= 8
    assert not [fd for fd in Path("/proc/self/fd").iterdir() if str(tmp_path) in str(fd.resolve())]


def edit_shard(path: Path, edit: Callable[[dict], Any]) -> None:
    """Rewrite a shard with changed tensors under its own metadata."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    edit(tensors)
    save_file(tensors, path, metadata=metadata)
