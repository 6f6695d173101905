"""Files of speculators 0.3 to 0.9 into a store: values, account, and faults that are named before anything is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.data import Eagle3SampleFileDataset
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract.import_samples import import_samples
from eagle3lab.extract.self_test import self_test_store
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import read_facts

IDS = (2, 3, 4)
GENERATOR = torch.Generator().manual_seed(11)
ROWS = [torch.randint(2, 96, (n,), generator=GENERATOR).tolist() for n in (23, 44, 12, 31, 9)]
MASKS = [[int(k > 4) for k in range(len(row))] for row in ROWS]


@pytest.fixture(scope="module")
def states(llama: Path) -> list[torch.Tensor]:
    """[T, 4, hidden] of every row, bf16: three aux layers and the last state."""
    engine = HuggingFaceEngine(llama, read_facts(llama))
    captured = engine.capture(ROWS, IDS)
    joined = [torch.cat([s.aux, s.last], dim=1).unflatten(1, (4, -1)) for s in captured]
    return [s.to(torch.bfloat16) for s in joined]


def write_v0(path: Path, states: list[torch.Tensor]) -> None:
    path.mkdir()
    for i, (s, ids, mask) in enumerate(zip(states, ROWS, MASKS, strict=True)):
        data = {"hidden_state": s[:, :3].flatten(1), "target": s[:, 3].clone()}
        torch.save(
            {**data, "input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}, path / f"data_{i}.pt"
        )


def write_v1(path: Path, states: list[torch.Tensor]) -> None:
    path.mkdir()
    for i, (s, ids, mask) in enumerate(zip(states, ROWS, MASKS, strict=True)):
        data = {"hidden_states": [part.contiguous() for part in s.unbind(1)]}
        torch.save(
            {**data, "input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}, path / f"data_{i}.pt"
        )


def write_arrow(path: Path, states: list[torch.Tensor]) -> None:
    from datasets import Dataset

    pairs = zip(ROWS, MASKS, strict=True)
    Dataset.from_list([{"input_ids": r, "loss_mask": m, "seq_len": len(r)} for r, m in pairs]).save_to_disk(
        str(path)
    )
    (path / "hidden_states").mkdir()
    for i, (s, ids) in enumerate(zip(states, ROWS, strict=True)):
        tensors = {"hidden_states": s.contiguous(), "token_ids": torch.tensor(ids)}
        save_file(tensors, path / "hidden_states" / f"hs_{i}.safetensors")


def run(source: Path, store: Path, verifier: Path, **options) -> StoreReader:
    options = {"layer_ids": IDS, "say": lambda _: None, "shard_tokens": 50} | options
    import_samples(source, store, ModelConfig(name="random", path=str(verifier)), verifier, **options)
    return StoreReader(store, verify="full")


@pytest.mark.parametrize("write", [write_v0, write_v1, write_arrow])
def test_every_form_becomes_the_same_store_of_the_same_values(tmp_path, llama, states, write):
    write(tmp_path / "old", states)
    reader = run(tmp_path / "old", tmp_path / "store", llama, validation_share=0.5)
    assert len(reader) == len(ROWS)
    for i, (ids, mask, wanted) in enumerate(zip(ROWS, MASKS, states, strict=True)):
        row = reader.read(i)
        assert row["input_ids"].tolist() == ids
        assert row["loss_mask"].tolist() == mask
        assert torch.equal(row["aux_hidden_states"], wanted[:, :3].flatten(1))
        assert torch.equal(row["verifier_last_hidden_states"], wanted[:, 3])
    assert {row.split for row in reader.rows} == {"train", "validation"}
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    assert manifest["layer_ids"] == list(IDS)
    assert manifest["dtype"] == "bfloat16"
    assert manifest["tokenizer_hash"] == "unknown: imported"
    assert manifest["accounting"]["read"] == manifest["accounting"]["kept"] == len(ROWS)
    assert self_test_store(reader, llama, read_facts(llama)).passed
    old, new = Eagle3SampleFileDataset(tmp_path / "old"), Eagle3SampleFileDataset(tmp_path / "store")
    for i in range(len(old)):
        for name in ("input_ids", "loss_mask", "hidden_states", "verifier_last_hidden_states"):
            assert torch.equal(old[i][name], new[i][name])


def test_a_store_dtype_can_be_chosen(tmp_path, llama, states):
    write_v1(tmp_path / "old", states)
    reader = run(tmp_path / "old", tmp_path / "store", llama, dtype="float8_e4m3")
    got = reader.read(1)["verifier_last_hidden_states"].float()
    assert 0 < float((got - states[1][:, 3].float()).norm() / got.norm()) < 0.04


def test_kinds_of_states_that_no_store_keeps_are_chosen_and_never_mixed(tmp_path, llama, states):
    write_v1(tmp_path / "old", [s.double() for s in states])
    with pytest.raises(UserError, match=r"torch\.float64.*\n.*--dtype float32"):
        run(tmp_path / "old", tmp_path / "store", llama)
    assert run(tmp_path / "old", tmp_path / "store", llama, dtype="float32").manifest.dtype == "float32"
    file = tmp_path / "old" / "data_4.pt"
    data = torch.load(file, weights_only=True)
    data["hidden_states"] = [*data["hidden_states"][:3], data["hidden_states"][3].to(torch.bfloat16)]
    torch.save(data, file)
    with pytest.raises(IntegrityError, match=r"data_4\.pt: dtype.*last state torch\.bfloat16"):
        run(tmp_path / "old", tmp_path / "other", llama, dtype="float32")


def test_layers_of_another_convention_are_named_before_anything_is_written(tmp_path, llama, states):
    write_v1(tmp_path / "old", states)
    with pytest.raises(IntegrityError, match=r"every aux slot is \+1 layer off[\s\S]*--layer-ids"):
        run(tmp_path / "old", tmp_path / "store", llama, layer_ids=(1, 2, 3))
    assert not (tmp_path / "store").exists()


def test_another_checkpoint_of_the_same_shape_is_named(tmp_path, llama, states, make_model):
    write_v1(tmp_path / "old", states)
    with pytest.raises(IntegrityError, match="another checkpoint of the same shape"):
        run(tmp_path / "old", tmp_path / "store", make_model(seed=1))
    assert not (tmp_path / "store").exists()


def test_another_number_of_layers_or_width_is_refused(tmp_path, llama, states, make_model):
    write_v1(tmp_path / "old", states)
    with pytest.raises(UserError, match=r"the files hold 3 aux layers.*\[2, 4\]"):
        run(tmp_path / "old", tmp_path / "store", llama, layer_ids=(2, 4))
    with pytest.raises(UserError, match=r"strictly increasing ids\s+try: --layer-ids 2 4 5"):
        run(tmp_path / "old", tmp_path / "store", llama, layer_ids=(4, 2, 5))
    narrow = make_model(hidden_size=32, head_dim=8)
    with pytest.raises(UserError, match="hidden size of the states: 64; expected 32"):
        run(tmp_path / "old", tmp_path / "store", narrow)


def test_short_double_and_unsupervised_rows_are_counted(tmp_path, llama, states):
    write_v1(tmp_path / "old", states)
    data = torch.load(tmp_path / "old" / "data_0.pt", weights_only=True)
    torch.save(data, tmp_path / "old" / "data_5.pt")
    one = {"hidden_states": [s[:1] for s in data["hidden_states"]], "input_ids": data["input_ids"][:1]}
    torch.save({**one, "loss_mask": torch.ones(1, dtype=torch.int64)}, tmp_path / "old" / "data_6.pt")
    data["loss_mask"] = torch.zeros_like(data["loss_mask"])
    torch.save(data, tmp_path / "old" / "data_7.pt")
    (tmp_path / "old" / "a").mkdir()  # read first, and of another kind than those that are kept
    none = {"hidden_states": [torch.empty(0, 32) for _ in range(4)], "input_ids": torch.arange(0)}
    torch.save({**none, "loss_mask": torch.ones(0)}, tmp_path / "old" / "a" / "data_0.pt")
    store = run(tmp_path / "old", tmp_path / "store", llama)
    assert store.manifest.dtype == "bfloat16"
    account = store.manifest.accounting
    assert account["read"] == 9
    assert account["kept"] == 7
    assert account["dropped"] == {"too_short": 2}
    assert account["noted"] == {"duplicate": 1, "unsupervised": 1}


def test_ids_beyond_the_vocabulary_are_refused(tmp_path, llama, states):
    write_v1(tmp_path / "old", states)
    data = torch.load(tmp_path / "old" / "data_2.pt", weights_only=True)
    data["input_ids"][3] = 96
    torch.save(data, tmp_path / "old" / "data_2.pt")
    with pytest.raises(IntegrityError, match=r"data_2\.pt: ids or mask: \[96\]"):
        run(tmp_path / "old", tmp_path / "store", llama)


def test_an_interrupted_import_goes_on_to_the_same_bytes(tmp_path, llama, states, monkeypatch):
    write_v1(tmp_path / "old", states)
    run(tmp_path / "old", tmp_path / "whole", llama)
    data = (tmp_path / "old" / "data_3.pt").read_bytes()
    bad = torch.load(tmp_path / "old" / "data_3.pt", weights_only=True)
    bad["hidden_states"][1][5, 5] = float("nan")
    torch.save(bad, tmp_path / "old" / "data_3.pt")
    with pytest.raises(IntegrityError, match=r"data_3\.pt: 1 NaN in slot 1"):
        run(tmp_path / "old", tmp_path / "store", llama, self_test_rows=1)
    (tmp_path / "old" / "data_3.pt").write_bytes(data)
    run(tmp_path / "old", tmp_path / "store", llama)
    trees = [
        {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}
        for root in (tmp_path / "whole", tmp_path / "store")
    ]
    assert trees[0] == trees[1]
