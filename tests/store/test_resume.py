"""Interrupted and resumed equals uninterrupted, byte for byte."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter


@pytest.fixture
def whole(tmp_path: Path, fake: SimpleNamespace) -> dict[str, bytes]:
    fake.write(tmp_path / "whole", fake.rows(), fake.manifest())
    return fake.tree(tmp_path / "whole")


def num_shards(whole: dict[str, bytes]) -> int:
    return sum(name.startswith("shards/") for name in whole)


def test_the_same_rows_give_the_same_bytes_twice(tmp_path: Path, fake: SimpleNamespace, whole: dict) -> None:
    fake.write(tmp_path / "again", fake.rows(), fake.manifest())
    assert fake.tree(tmp_path / "again") == whole
    assert num_shards(whole) >= 3


def test_a_stop_before_any_shard_resumes_to_the_same_bytes(
    tmp_path: Path, fake: SimpleNamespace, whole: dict
) -> None:
    for stop in range(num_shards(whole) + 1):
        path = tmp_path / f"stop{stop}"
        fake.write(path, fake.rows(), fake.manifest(), stop_before=stop)
        fake.write(path, fake.rows(), fake.manifest())
        assert fake.tree(path) == whole, stop


def test_an_exception_inside_a_shard_leaves_nothing_and_resumes(
    tmp_path: Path, fake: SimpleNamespace, whole: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    import eagle3lab.store.files as files

    path = tmp_path / "store"
    calls = iter(range(100))
    replace = files.os.replace

    def failing(source: Any, target: Any) -> None:
        if str(target).endswith(".safetensors") and next(calls) == 1:
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(files.os, "replace", failing)
    with pytest.raises(KeyboardInterrupt):
        fake.write(path, fake.rows(), fake.manifest())
    monkeypatch.undo()
    assert sorted(p.name for p in (path / "shards").iterdir()) == ["00000.safetensors"]
    fake.write(path, fake.rows(), fake.manifest())
    assert fake.tree(path) == whole


def test_leftovers_of_a_kill_are_removed_and_reported(
    tmp_path: Path, fake: SimpleNamespace, whole: dict
) -> None:
    path = tmp_path / "store"
    fake.write(path, fake.rows(), fake.manifest(), stop_before=2)
    (path / "shards" / "00002.safetensors.tmp").write_bytes(b"half a shard")
    (path / "shards" / "00002.safetensors").write_bytes(b"renamed but never indexed")
    (path / "token_counts.safetensors.tmp").write_bytes(b"")
    with StoreWriter(path, fake.manifest(), fake.rows(), 40) as writer:
        assert [number for number, _ in writer.pending()] == list(range(2, num_shards(whole)))
        assert sum("left by an interrupted run" in note for note in writer.notes) == 2
    fake.write(path, fake.rows(), fake.manifest())
    assert fake.tree(path) == whole


@pytest.mark.parametrize(
    "torn", [b'{"file":"shards/00002', b'{"file":"shards/00002.safetensors"}', b"\0\0\0\n"]
)
def test_a_torn_last_index_line_is_cut(
    tmp_path: Path, fake: SimpleNamespace, whole: dict, torn: bytes
) -> None:
    path = tmp_path / "store"
    fake.write(path, fake.rows(), fake.manifest(), stop_before=2)
    with open(path / "index.jsonl", "ab") as index:
        index.write(torn)
    with StoreWriter(path, fake.manifest(), fake.rows(), 40) as writer:
        assert next(writer.pending())[0] == 2
        assert any("torn" in note for note in writer.notes)
    fake.write(path, fake.rows(), fake.manifest())
    assert fake.tree(path) == whole


def test_a_kill_between_manifest_and_index_resumes(
    tmp_path: Path, fake: SimpleNamespace, whole: dict
) -> None:
    path = tmp_path / "store"
    fake.write(path, fake.rows(), fake.manifest(), stop_before=0)
    (path / "index.jsonl").unlink()
    fake.write(path, fake.rows(), fake.manifest())
    assert fake.tree(path) == whole


def test_a_damaged_index_line_before_the_last_is_refused(store: Path, fake: SimpleNamespace) -> None:
    lines = (store / "index.jsonl").read_text().splitlines(keepends=True)
    lines[1] = lines[1].replace('"offset":0', '"offset":1', 1)
    (store / "index.jsonl").write_text("".join(lines))
    with pytest.raises(IntegrityError, match="line 2 is damaged"):
        fake.write(store, fake.rows(), fake.manifest())


@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_a_damaged_indexed_shard_is_said_and_written_again(
    store: Path, fake: SimpleNamespace, whole: dict, damage: str
) -> None:
    shard = store / "shards" / "00001.safetensors"
    if damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-5])
    else:
        shard.unlink()
    with StoreWriter(store, fake.manifest(), fake.rows(), 40) as writer:
        assert [number for number, _ in writer.pending()] == [1]
        assert any("shards/00001.safetensors again" in note for note in writer.notes)
        assert not writer.manifest.complete
    with pytest.raises(UserError, match="not finished"):
        StoreReader(store)
    fake.write(store, fake.rows(), fake.manifest())
    assert fake.tree(store) == whole


@pytest.mark.parametrize("damage", ["changed", "removed"])
def test_damaged_token_counts_of_a_finished_store_are_said_and_written_again(
    store: Path, fake: SimpleNamespace, whole: dict, damage: str
) -> None:
    counts = store / "token_counts.safetensors"
    if damage == "changed":
        counts.write_bytes(counts.read_bytes()[:-8] + b"\1" * 8)
    else:
        counts.unlink()
    other_engine = fake.manifest(engine={"name": "hf", "transformers": "6.0"})  # it has nothing to do
    with StoreWriter(store, other_engine, fake.rows(), 1000) as writer:
        assert list(writer.pending()) == []
        assert any("token_counts.safetensors again" in note for note in writer.notes)
        writer.finish()
    assert fake.tree(store) == whole


def test_a_finished_store_keeps_no_part_of_a_shard(
    tmp_path: Path, fake: SimpleNamespace, whole: dict
) -> None:
    fake.write(tmp_path / "store", fake.rows(), fake.manifest(), stop_before=1)
    (tmp_path / "store/partial").mkdir()
    for name in (
        "00000.safetensors",
        "00001.safetensors.tmp",
    ):  # a kill before it was dropped, and while written
        (tmp_path / "store/partial" / name).write_bytes(b"left")
    fake.write(tmp_path / "store", fake.rows(), fake.manifest())
    assert fake.tree(tmp_path / "store") == whole


def test_a_complete_store_has_nothing_pending_and_is_left_alone(store: Path, fake: SimpleNamespace) -> None:
    before = {p: p.stat().st_mtime_ns for p in store.rglob("*")}
    other_engine = fake.manifest(engine={"name": "hf", "transformers": "6.0"})
    with StoreWriter(store, other_engine, fake.rows(), 1000) as writer:
        assert list(writer.pending()) == []
        assert writer.finish().complete
    assert {p: p.stat().st_mtime_ns for p in store.rglob("*")} == before


@pytest.mark.parametrize(
    ("change", "field", "both"),
    [
        ({"weight_fingerprint": "other"}, "weight_fingerprint", ("wwwwwwww", "other")),
        ({"config_hash": "other"}, "config_hash", ("cccccccc", "other")),
        ({"layer_ids": (1, 4, 5)}, "layer_ids", ("(2, 4, 5)", "(1, 4, 5)")),
        ({"dtype": "float32"}, "dtype", ("bfloat16", "float32")),
        ({"tokenizer_hash": "other"}, "tokenizer_hash", ("tttttttt", "other")),
        ({"template_args_hash": "other"}, "template_args_hash", ("aaaaaaaa", "other")),
        ({"engine": {"name": "vllm"}}, "engine", ("transformers", "vllm")),
    ],
)
def test_another_verifier_or_setting_is_refused_with_both_values(
    tmp_path: Path, fake: SimpleNamespace, change: dict, field: str, both: tuple
) -> None:
    fake.write(tmp_path, fake.rows(), fake.manifest(), stop_before=1)
    before = fake.tree(tmp_path)
    with pytest.raises(UserError) as caught:
        fake.write(tmp_path, fake.rows(), fake.manifest(**change))
    text = str(caught.value)
    assert f"another {field}" in text
    assert all(value in text for value in both)
    assert "store=ANOTHER_DIRECTORY" in text
    assert fake.tree(tmp_path) == before


def test_another_plan_is_refused_and_every_difference_named(store: Path, fake: SimpleNamespace) -> None:
    rows = fake.rows()
    with pytest.raises(UserError) as caught:
        fake.write(store, rows[:-1], fake.manifest(layer_ids=(1, 4, 5)))
    text = str(caught.value)
    assert all(name in text for name in ("layer_ids", "num_rows", "num_tokens", "planned_rows_hash"))
    moved = [type(row)(**{**row.__dict__, "split": "validation"}) for row in rows]
    with pytest.raises(UserError, match="planned_rows_hash"):
        fake.write(store, moved, fake.manifest())


def test_an_unfinished_store_keeps_its_shard_size(tmp_path: Path, fake: SimpleNamespace) -> None:
    fake.write(tmp_path, fake.rows(), fake.manifest(), stop_before=1)
    with pytest.raises(UserError, match="shard_tokens"):
        fake.write(tmp_path, fake.rows(), fake.manifest(), shard_tokens=80)


def test_a_directory_that_is_no_store_is_not_written(tmp_path: Path, fake: SimpleNamespace) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        fake.write(tmp_path, fake.rows(), fake.manifest())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def _try_to_write(path: Path, manifest: Any, rows: Any, answers: Any) -> None:
    try:
        with StoreWriter(path, manifest, rows, 40):
            answers.put("wrote")
    except UserError as error:
        answers.put(str(error))


def test_two_processes_cannot_write_one_store(tmp_path: Path, fake: SimpleNamespace) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    arguments = (tmp_path, fake.manifest(), fake.rows(), answers)
    with StoreWriter(*arguments[:3], 40):
        child = context.Process(target=_try_to_write, args=arguments)
        child.start()
        assert "another process" in answers.get(timeout=20)
        child.join()
    child = context.Process(target=_try_to_write, args=arguments)
    child.start()
    assert answers.get(timeout=20) == "wrote"
    child.join()


def test_the_index_lists_shards_in_order_after_an_out_of_order_repair(
    tmp_path: Path, fake: SimpleNamespace, whole: dict
) -> None:
    path = tmp_path / "store"
    with StoreWriter(path, fake.manifest(), fake.rows(), 40) as writer:
        for number, rows in reversed(list(writer.pending())):
            writer.write_shard(number, [fake.states(row, torch.bfloat16) for row in rows])
        writer.finish()
    assert fake.tree(path) == whole
    files = [json.loads(line)["file"] for line in (path / "index.jsonl").read_text().splitlines()]
    assert files == sorted(files)
