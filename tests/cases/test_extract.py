"""EXT cases on the Hugging Face backend, through the whole pipeline."""

from __future__ import annotations

import io
import json
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from eagle3lab.config.errors import EXIT_USER_ERROR, IntegrityError, UserError
from eagle3lab.config.schema import DataConfig, ExtractorConfig, HardwareConfig, ModelConfig, StoreDtype
from eagle3lab.extract.pipeline import extract_store
from eagle3lab.extract.report import ExtractReport
from eagle3lab.store.manifest import read_manifest, write_manifest
from eagle3lab.store.reader import StoreReader

CASES = Path(__file__).parent
SHARED = CASES / "_shared"


def expected(case: str) -> dict:
    return json.loads((CASES / case / "expected.json").read_text())


def extract(
    case: str,
    store: Path,
    *,
    target="target_tiny",
    file="data.jsonl",
    aux_layer_ids=None,
    console=None,
    **options,
) -> ExtractReport:
    options.setdefault("dtype", StoreDtype.float32)
    return extract_store(
        model=ModelConfig(
            name=target,
            path=str(SHARED / target),
            tokenizer=str(SHARED / "tok_bytes"),
            template=str(SHARED / "templates" / "plain.jinja"),
            aux_layer_ids=aux_layer_ids,
        ),
        data=DataConfig(name=case, paths=[str(CASES / case / file)], validation_share=0.0),
        extract=ExtractorConfig(**options),
        hardware=HardwareConfig(name="cpu"),
        store=store,
        console=console or Console(file=io.StringIO()),
    )


def slots(store: Path) -> list[torch.Tensor]:
    """Per row: [tokens, slots, hidden], the layout of the cases' files."""
    reader = StoreReader(store)
    hidden = reader.manifest.verifier.hidden_size
    rows = [reader.read(i) for i in range(len(reader))]
    joined = [torch.cat([r["aux_hidden_states"], r["verifier_last_hidden_states"]], -1) for r in rows]
    return [states.unflatten(-1, (-1, hidden)) for states in joined]


@pytest.mark.parametrize("case", ["EXT-01", "EXT-02"])
@pytest.mark.parametrize("batch_tokens", [1, 300, 500, 4096])
def test_rows_are_as_extracted_one_at_a_time(case, batch_tokens, tmp_path):
    extract(case, tmp_path / "store", batch_tokens=batch_tokens)
    got = slots(tmp_path / "store")
    want = list(load_file(CASES / case / "expected_hidden.safetensors").values())
    rows = expected(case)["rows_per_sample" if case == "EXT-01" else "rows"]
    assert [len(states) for states in got] == rows
    for states, reference in zip(got, want, strict=True):
        torch.testing.assert_close(states, reference, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["EXT-04", "EXT-05"])
def test_slots_hold_the_layers_they_are_named_after(case, tmp_path):
    extract(case, tmp_path / "store", target="target_ladder", aux_layer_ids=[2, 4, 5])
    (states,) = slots(tmp_path / "store")
    want = expected("EXT-04")
    assert len(states) == want["token_rows"]
    for slot, value in enumerate(want["slot_values"]):
        assert torch.equal(states[:, slot], torch.full_like(states[:, slot], value))
    assert float(states[0, -1, 0]) == expected("EXT-05")["last_slot_value"]
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["layer_ids"] == [2, 4, 5]
    assert manifest["layer_convention"] == "hf_hidden_states"
    assert manifest["last_state"] == "pre_norm"


def test_ext_05_a_store_marked_as_post_norm_is_refused(tmp_path):
    extract("EXT-05", tmp_path / "store", target="target_ladder", aux_layer_ids=[2, 4, 5])
    file = tmp_path / "store" / "manifest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"last_state": "post_norm"}))
    with pytest.raises(IntegrityError, match="last_state 'post_norm' is not 'pre_norm'"):
        StoreReader(tmp_path / "store")


def test_ext_07_ids_in_another_order_are_an_error(tmp_path):
    with pytest.raises(UserError, match="increasing"):
        extract("EXT-07", tmp_path / "store", target="target_ladder", aux_layer_ids=[5, 2, 4])
    assert not (tmp_path / "store").exists()


def tree(store: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and "logs" not in path.parts
    }


def test_ext_10_only_whole_indexed_shards_are_kept(tmp_path):
    """The case's partial output in this layout: row 0 whole, 1 cut, 2 temporary, 3 empty, 4 absent, one stray."""
    extract("EXT-10", tmp_path / "whole", shard_tokens=1)
    store = tmp_path / "store"
    shutil.copytree(tmp_path / "whole", store)
    shards = store / "shards"
    index = (store / "index.jsonl").read_text().splitlines(keepends=True)
    (store / "index.jsonl").write_text("".join(index[:2]))
    write_manifest(store, replace(read_manifest(store), complete=False, checksums={}))
    cut = (shards / "00001.safetensors").read_bytes()
    (shards / "00001.safetensors").write_bytes(cut[: len(cut) * 3 // 5])
    (shards / "00002.safetensors").rename(shards / "00002.safetensors.tmp")
    (shards / "00003.safetensors").write_bytes(b"")
    (shards / "00004.safetensors").unlink()
    kept = (shards / "00000.safetensors").stat().st_mtime_ns
    report = extract("EXT-10", store, shard_tokens=1)
    assert report.num_captured_rows == len(expected("EXT-10")["extracted_again"])
    assert (shards / "00000.safetensors").stat().st_mtime_ns == kept
    assert tree(store) == tree(tmp_path / "whole")
    assert [row.length for row in StoreReader(store).rows] == [25] * 5


def test_ext_11_rows_in_another_order_are_another_plan(tmp_path):
    extract("EXT-11", tmp_path / "store", file="data_v1.jsonl")
    before = tree(tmp_path / "store")
    with pytest.raises(UserError, match="planned_rows_hash"):
        extract("EXT-11", tmp_path / "store", file="data_v2.jsonl")
    assert tree(tmp_path / "store") == before


def test_ext_12_a_store_that_cannot_fit_is_refused_before_the_model_is_loaded(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**9, 10**9, 10**6))
    monkeypatch.setattr(
        "eagle3lab.extract.pipeline.build_engine", lambda *_, **__: pytest.fail("model loaded")
    )
    monkeypatch.setattr(
        "eagle3lab.extract.pipeline.reference_forward", lambda *_, **__: pytest.fail("loaded")
    )
    said = io.StringIO()
    with pytest.raises(UserError) as caught:
        extract("EXT-12", tmp_path / "store", console=Console(file=said), dtype=StoreDtype.bfloat16)
    want = expected("EXT-12")
    total = (
        want["total_estimate_bytes"] + 20 * want["tokens_per_sample"] * 9
    )  # and an id and a mask per token
    assert f"needs {total:,} bytes" in str(caught.value)
    assert "1,000,000 bytes" in str(caught.value)
    assert "disk: 6,420 tokens x 4 states x 32 x bfloat16" in said.getvalue()


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_ext_12_a_full_disk_ends_the_run_and_leaves_nothing_short(tmp_path):
    store = tmp_path / "store"
    with (
        pytest.raises(UserError, match=r"cannot write .*00000\.safetensors \(errno 27") as caught,
        file_size_limit(20000),
    ):
        extract("EXT-12", store, dtype=StoreDtype.bfloat16, shard_tokens=321)
    assert EXIT_USER_ERROR != 0
    assert "every shard in the index stays valid" in str(caught.value)
    assert not list((store / "shards").iterdir())
    assert extract("EXT-12", store, dtype=StoreDtype.bfloat16, shard_tokens=321).num_captured_rows == 20


def test_ext_16_one_rule_for_rows_beyond_the_verifiers_positions(tmp_path):
    extract("EXT-16", tmp_path / "store")
    reader = StoreReader(tmp_path / "store")
    want = expected("EXT-16")
    assert reader.manifest.accounting["dropped"] == {"too_long": 1}
    assert [row.length for row in reader.rows] == [want["short"]]
    row = reader.read(0)
    assert {len(tensor) for tensor in row.values()} == {want["short"]}
