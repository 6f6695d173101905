"""Older sample files: which are found, how they are split, and what is refused."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.data import (
    Eagle3SampleFileDataset,
    list_files,
    split_files,
    standardize_data_v0,
    standardize_data_v1,
)
from eagle3lab.data.legacy import load_sample_file
from eagle3lab.data.sample_files import SampleFiles


def test_only_exact_data_files_are_listed_in_numeric_order(tmp_path: Path) -> None:
    names = ["data_10.pt", "data_9.pt", "data_0.pt", "hs_2.safetensors", "b/data_1.pt", "a/data_1.pt"]
    others = [
        "token_freq.pt",
        "prompt",
        "data_1.pt.tmp",
        "data_x.pt",
        "hs_04.safetensors",
        "hs_1.safetensors.tmp",
        "data_3.ppt",
        "sample_lengths.json",
        "hs_-1.safetensors",
    ]
    for name in names + others:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / "data_7.pt").mkdir()
    found = [str(path.relative_to(tmp_path)) for path in list_files(tmp_path)]
    assert found == [
        "data_0.pt",
        "hs_2.safetensors",
        "data_9.pt",
        "data_10.pt",
        "a/data_1.pt",
        "b/data_1.pt",
    ]
    assert list_files(str(tmp_path)) == list_files(tmp_path)


def test_split_files_is_a_seeded_partition_and_leaves_the_global_generator(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"data_{i}.pt").touch()
    random.seed(5)
    state = random.getstate()
    train, validation = split_files(str(tmp_path), ratio=0.9, seed=3)
    assert random.getstate() == state
    assert (len(train), len(validation)) == (18, 2)
    assert sorted(train + validation) == sorted(list_files(tmp_path))
    assert split_files(tmp_path, ratio=0.9, seed=3) == (train, validation)
    assert split_files(tmp_path, ratio=0.9, seed=4) != (train, validation)


def test_standardize_v0_and_v1_agree_on_the_same_states() -> None:
    states = torch.randn(5, 4, 6)
    ids, mask = torch.arange(5), torch.ones(5)
    v0 = standardize_data_v0(
        {
            "hidden_state": states[:, :3].flatten(1),
            "target": states[:, 3],
            "input_ids": ids,
            "loss_mask": mask,
        }
    )
    v1 = standardize_data_v1({"hidden_states": list(states.unbind(1)), "input_ids": ids, "loss_mask": mask})
    assert set(v0) == {"hidden_states", "input_ids", "verifier_last_hidden_states", "loss_mask"}
    assert all(torch.equal(v0[name], v1[name]) for name in v0)
    assert torch.equal(v1["hidden_states"][2], torch.cat([states[2, 0], states[2, 1], states[2, 2]]))


def test_lengths_are_exact_whatever_the_file_sizes_or_length_files_say(
    tmp_path: Path, make: SimpleNamespace
) -> None:
    samples = make.samples(4)
    make.v1(tmp_path, samples)
    data = torch.load(tmp_path / "data_1.pt", weights_only=True)
    torch.save(data | {"padding": torch.zeros(5000)}, tmp_path / "data_1.pt")
    (tmp_path / "sample_lengths.json").write_text('{"0": 999, "1": 999, "2": 999, "3": 999}')
    assert Eagle3SampleFileDataset(tmp_path).lengths == [len(sample.ids) - 1 for sample in samples]


def test_files_that_are_no_samples_are_said_and_not_read(tmp_path: Path, make: SimpleNamespace) -> None:
    make.v1(tmp_path, make.samples(2))
    torch.save({"freq": torch.ones(3)}, tmp_path / "token_freq.pt")
    with pytest.warns(UserWarning, match=r"1 files are no samples .*token_freq\.pt"):
        assert len(Eagle3SampleFileDataset(tmp_path)) == 2


def test_a_pt_file_of_before_the_zip_format_is_read(tmp_path: Path, make: SimpleNamespace) -> None:
    sample = make.samples(1)[0]
    data = {"hidden_states": list(sample.states.unbind(1)), "input_ids": sample.ids, "loss_mask": sample.mask}
    torch.save(data, tmp_path / "data_0.pt", _use_new_zipfile_serialization=False)
    item = Eagle3SampleFileDataset(tmp_path)[0]
    assert torch.equal(item["hidden_states"], make.aligned(sample)["hidden_states"])


class Malicious:
    def __reduce__(self) -> tuple:
        return (Path.touch, (Path("executed.txt"),))


@pytest.mark.parametrize("zipped", [True, False])
def test_a_file_with_code_is_refused_by_name_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zipped: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"input_ids": Malicious()}, "data_0.pt", _use_new_zipfile_serialization=zipped)
    with pytest.raises(IntegrityError, match=r"data_0\.pt is refused"):
        Eagle3SampleFileDataset(tmp_path)
    assert not Path("executed.txt").exists()


@pytest.mark.parametrize("size", [0, 10, 400])
def test_a_cut_pt_file_is_refused_by_name(tmp_path: Path, make: SimpleNamespace, size: int) -> None:
    make.v1(tmp_path, make.samples(2))
    whole = (tmp_path / "data_1.pt").read_bytes()
    (tmp_path / "data_1.pt").write_bytes(whole[:size])
    with pytest.raises(IntegrityError, match=r"data_1\.pt"):
        Eagle3SampleFileDataset(tmp_path)


def test_files_that_are_not_there_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such directory of sample files: .*none"):
        SampleFiles(tmp_path / "none", standardize_data_v1)
    with pytest.raises(IntegrityError, match=r"data_0\.pt.*No such file"):
        Eagle3SampleFileDataset([tmp_path / "data_0.pt"])


def test_other_kinds_of_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.npz").touch()
    with pytest.raises(UserError, match=r"data\.npz is no sample file: '\.npz'"):
        load_sample_file(tmp_path / "data.npz")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d["hidden_states"][1].__setitem__((0, 0), float("nan")), "1 NaN in slot 1"),
        (lambda d: d["hidden_states"][3].__setitem__((0, 0), float("inf")), "1 Inf in slot 3"),
        (lambda d: d["hidden_states"][0].zero_(), "all zero in slot 0"),
        (lambda d: d.update(loss_mask=d["loss_mask"][1:]), "lengths differ"),
        (lambda d: d.update(hidden_states=[h[:-1] for h in d["hidden_states"]]), "lengths differ"),
        (lambda d: d.update(hidden_states=d["hidden_states"][1:]), "widths"),
        (lambda d: d.update(hidden_states=torch.zeros(3)), "shapes|not of the form"),
        (lambda d: d.pop("hidden_states"), "not of the form"),
    ],
)
def test_damaged_samples_are_refused_with_file_and_slot(
    tmp_path: Path, make: SimpleNamespace, change: object, message: str
) -> None:
    make.v1(tmp_path, make.samples(3))
    data = torch.load(tmp_path / "data_2.pt", weights_only=True)
    change(data)
    torch.save(data, tmp_path / "data_2.pt")
    dataset = Eagle3SampleFileDataset(tmp_path)
    dataset[1]
    with pytest.raises(IntegrityError, match=message) as caught:
        dataset[2]
    assert "data_2.pt" in str(caught.value)


def test_a_missing_loss_mask_is_never_invented(tmp_path: Path, make: SimpleNamespace) -> None:
    sample = make.samples(1)[0]
    save_file({"hidden_states": sample.states, "token_ids": sample.ids}, tmp_path / "hs_0.safetensors")
    with pytest.raises(UserError, match="no loss mask"):
        Eagle3SampleFileDataset(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": torch.full((6,), 0.5)}, "loss mask; expected a tensor of 0 and 1"),
        ({"loss_mask": torch.full((6,), 256)}, "loss mask; expected a tensor of 0 and 1"),
        ({"loss_mask": [1] * 6}, "loss mask; expected a tensor of 0 and 1"),
        ({"input_ids": torch.arange(6) + 0.5}, "token ids: 'torch.float32'; expected whole numbers"),
        ({"hidden_states": []}, "is not of the form"),
        ({"input_ids": torch.ones(6, dtype=torch.bool)}, "token ids: 'torch.bool'; expected whole numbers"),
        ({"input_ids": torch.arange(6).to_sparse()}, "torch.sparse_coo on cpu"),
        ({"input_ids": torch.tensor(3)}, r"shape of the token ids: \[\]"),
        ({"input_ids": torch.arange(6)[None]}, r"shape of the token ids: \[1, 6\]"),
        ({"loss_mask": torch.tensor(1)}, "lengths differ"),
        (
            {"hidden_states": [torch.ones(6, 4).long()] * 4},
            "hidden_states: 'torch.int64'; expected a tensor of",
        ),
        (
            {"hidden_states": [*[torch.ones(6, 4)] * 3, torch.ones(6, 4).bool()]},
            "verifier_last_hidden_states: 'torch.bool'",
        ),
        ({"hidden_states": [torch.ones(6, 4, dtype=torch.float8_e4m3fn)] * 4}, "float8_e4m3fn"),
        ({"hidden_states": [torch.empty(6, 4, device="meta")] * 4}, "torch.strided on meta"),
        ({"hidden_states": [torch.empty(6, 0)] * 4}, "shapes"),
    ],
)
def test_masks_and_ids_are_never_cut_to_whole_numbers(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    whole = {
        "input_ids": torch.arange(6),
        "loss_mask": torch.ones(6),
        "hidden_states": [torch.randn(6, 4) for _ in range(4)],
    }
    torch.save(whole, tmp_path / "data_0.pt")
    torch.save({**whole, **changed}, tmp_path / "data_1.pt")
    with pytest.raises(IntegrityError, match=rf"data_1\.pt.*{message}"):
        [(f.read_tokens(1), f.read(1)) for f in [SampleFiles(tmp_path, standardize_data_v1)]]


def test_a_row_of_no_token_is_named_with_its_length(tmp_path: Path, make: SimpleNamespace) -> None:
    make.v1(tmp_path, make.samples(1))
    states = [torch.empty(0, make.HIDDEN)] * 4
    torch.save(
        {"hidden_states": states, "input_ids": torch.arange(0), "loss_mask": torch.ones(0)},
        tmp_path / "data_7.pt",
    )
    with pytest.raises(IntegrityError, match=r"data_7\.pt leaves nothing.*: 0; expected at least 2"):
        Eagle3SampleFileDataset(tmp_path)
    tensors = {"hidden_states": torch.randn(3, 4, 8), "token_ids": torch.tensor(3)}
    save_file(tensors, tmp_path / "hs_0.safetensors")
    with pytest.raises(IntegrityError, match=r"hs_0\.safetensors: shape of the token ids: \[\]"):
        Eagle3SampleFileDataset(tmp_path)


def test_a_mask_inside_the_safetensors_file_is_used(tmp_path: Path, make: SimpleNamespace) -> None:
    sample = make.samples(1)[0]
    tensors = {"hidden_states": sample.states, "token_ids": sample.ids, "loss_mask": sample.mask}
    save_file(tensors, tmp_path / "row.safetensors")
    item = Eagle3SampleFileDataset([tmp_path / "row.safetensors"])[0]
    expected = make.aligned(sample)
    assert all(torch.equal(item[name], expected[name]) for name in expected)


def test_arrow_rows_in_another_order_are_found_by_their_tokens(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = make.samples(3)
    make.arrow(tmp_path / "data", samples)
    states = tmp_path / "data" / "hidden_states"
    (states / "hs_0.safetensors").rename(states / "x")
    (states / "hs_1.safetensors").rename(states / "hs_0.safetensors")
    (states / "x").rename(states / "hs_1.safetensors")
    with pytest.raises(IntegrityError, match="2 of 3 files do not belong to their rows"):
        Eagle3SampleFileDataset(tmp_path / "data")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss_mask": [0.5, 0.5, 1.0]}, "loss mask; expected a tensor of 0 and 1"),  # once cut to 0 0 1
        ({"loss_mask": [256, 1, 1]}, "loss mask; expected a tensor of 0 and 1"),
        ({"loss_mask": None}, "has no usable loss_mask"),
        ({"loss_mask": [1, 1]}, "lengths differ"),
        ({"input_ids": ["1", "2", "3"]}, "has no usable input_ids"),
        ({"input_ids": [1.5, 2.0, 3.0]}, "1 of 1 files do not belong to their rows"),
        (None, "cannot be read as an Arrow dataset"),
    ],
)
def test_damaged_arrow_rows_are_told(tmp_path: Path, changed: dict[str, object] | None, message: str) -> None:
    from datasets import Dataset

    row = {"input_ids": [1, 2, 3], "loss_mask": [0, 1, 1], **(changed or {})}
    Dataset.from_list([row]).save_to_disk(str(tmp_path))
    if changed is None:
        (tmp_path / "dataset_info.json").write_text("{")
    tensors = {"hidden_states": torch.randn(3, 4, 8), "token_ids": torch.tensor([1, 2, 3])}
    save_file(tensors, tmp_path / "hs_0.safetensors")
    with pytest.raises(IntegrityError, match=message):
        SampleFiles(tmp_path, standardize_data_v1).read_tokens(0)


def test_arrow_rows_without_states_are_counted(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = make.samples(4)
    make.arrow(tmp_path / "data", samples)
    states = tmp_path / "data" / "hidden_states"
    (states / "hs_1.safetensors").unlink()
    (states / "hs_3.safetensors").unlink()
    with pytest.raises(UserError, match=r"2 of 4 rows have no states.*hs_1\.safetensors"):
        Eagle3SampleFileDataset(tmp_path / "data")
    some = Eagle3SampleFileDataset([states / "hs_2.safetensors", states / "hs_0.safetensors"])
    assert some[0]["loss_mask"].tolist() == samples[2].mask[1:].bool().tolist()


def test_states_after_the_final_norm_are_refused(tmp_path: Path, make: SimpleNamespace) -> None:
    sample = make.samples(1)[0]
    tensors = {"hidden_states": sample.states, "token_ids": sample.ids, "loss_mask": sample.mask}
    save_file(tensors, tmp_path / "hs_0.safetensors", metadata={"last_slot": "after_final_norm"})
    with pytest.raises(IntegrityError, match="after_final_norm"):
        Eagle3SampleFileDataset(tmp_path)
    save_file(tensors, tmp_path / "hs_0.safetensors", metadata={"last_slot": "before_final_norm"})
    assert len(Eagle3SampleFileDataset(tmp_path)) == 1


def test_quantised_states_without_their_scales_are_refused(tmp_path: Path, make: SimpleNamespace) -> None:
    sample = make.samples(1)[0]
    tensors = {
        "hidden_states": sample.states.to(torch.float8_e4m3fn),
        "token_ids": sample.ids,
        "loss_mask": sample.mask,
    }
    save_file(tensors, tmp_path / "hs_0.safetensors")
    with pytest.raises(UserError, match="float8"):
        Eagle3SampleFileDataset(tmp_path)


def test_older_files_have_no_split_and_no_layer_names(tmp_path: Path, make: SimpleNamespace) -> None:
    make.v1(tmp_path, make.samples(2))
    with pytest.raises(ValueError, match="split_files"):
        Eagle3SampleFileDataset(tmp_path, split="train")
    assert len(Eagle3SampleFileDataset(tmp_path, aux_layer_ids=(1, 2, 3))) == 2
    with pytest.raises(UserError, match="the files hold: 3"):
        Eagle3SampleFileDataset(tmp_path, aux_layer_ids=(1, 2))
