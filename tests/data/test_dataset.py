"""Items against a reference written position by position, for the store and for every older form."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.data import AddUniformNoise, Eagle3SampleFileDataset, shift_batch, standardize_data_v0
from eagle3lab.data.packing import Unweighted
from eagle3lab.store.reader import StoreReader


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("form", ["store", "v0", "v1", "arrow"])
def test_items_pair_each_state_with_the_next_token_and_target(
    tmp_path: Path, make: SimpleNamespace, form: str
) -> None:
    samples = make.samples()
    getattr(make, form)(tmp_path / "data", samples)
    dataset = Eagle3SampleFileDataset(tmp_path / "data")
    assert len(dataset) == len(samples)
    assert dataset.lengths == [len(sample.ids) - 1 for sample in samples]
    for i, sample in enumerate(samples):
        item = dataset[i]
        assert_same(item, make.aligned(sample))
        assert item["row_index"].tolist() == [i]
        assert set(item) == {*make.aligned(sample), "row_index"}


def test_a_store_may_be_given_open_and_by_split(store: Path, make: SimpleNamespace) -> None:
    samples = make.samples()
    reader = StoreReader(store)
    for split, chosen in (
        ("train", [s for i, s in enumerate(samples) if i % 5 != 4]),
        ("validation", [s for i, s in enumerate(samples) if i % 5 == 4]),
    ):
        dataset = Eagle3SampleFileDataset(reader, split=split)
        assert len(dataset) == len(chosen)
        for i, sample in enumerate(chosen):
            assert_same(dataset[i], make.aligned(sample))


@pytest.mark.parametrize(
    ("ids", "slots"), [((2,), (0,)), ((2, 5), (0, 2)), ((4, 5), (1, 2)), ((2, 4, 5), (0, 1, 2))]
)
def test_a_subset_of_the_stores_layers_is_read(
    store: Path, make: SimpleNamespace, ids: tuple, slots: tuple
) -> None:
    dataset = Eagle3SampleFileDataset(store, aux_layer_ids=ids)
    for i, sample in enumerate(make.samples()):
        assert_same(dataset[i], make.aligned(sample, slots))


def test_layers_the_store_lacks_are_named_with_those_it_has(store: Path) -> None:
    with pytest.raises(UserError, match=r"\[3, 6\]; expected some of \[2, 4, 5\]"):
        Eagle3SampleFileDataset(store, aux_layer_ids=(2, 3, 6))


def test_supervised_counts_are_the_shifted_mask_cut_at_every_step(store: Path, make: SimpleNamespace) -> None:
    dataset = Eagle3SampleFileDataset(store)
    for i, sample in enumerate(make.samples()):
        shifted = sample.mask[1:].tolist()
        for steps in (1, 3, 30):
            assert dataset.supervised_counts(i, steps) == tuple(sum(shifted[k:]) for k in range(steps))


@pytest.mark.parametrize("form", ["store", "v1", "arrow"])
def test_rows_that_teach_nothing_are_reported(tmp_path: Path, make: SimpleNamespace, form: str) -> None:
    samples = make.samples()
    for i, positions in ((1, []), (4, [0]), (6, [0, 2]), (7, [1])):
        samples[i].mask.zero_()
        samples[i].mask[positions] = 1
    for i in (0, 2, 3, 5, 8, 9, 10, 11):
        samples[i].mask[-1] = 1
    getattr(make, form)(tmp_path / "data", samples)
    assert Eagle3SampleFileDataset(tmp_path / "data").unsupervised_rows() == [1, 4]


def test_states_are_cast_when_asked_and_ids_never(store: Path, make: SimpleNamespace) -> None:
    item = Eagle3SampleFileDataset(store, hidden_states_dtype=torch.float32)[2]
    expected = make.aligned(make.samples()[2])
    for name in ("hidden_states", "verifier_last_hidden_states"):
        assert item[name].dtype == torch.float32
        assert torch.equal(item[name], expected[name].float())
    assert item["input_ids"].dtype == item["position_ids"].dtype == torch.int64


def test_values_that_overflow_float16_are_refused(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = make.samples(2)
    samples[1].states[2, 1, 3] = 70144.0
    make.store(tmp_path / "store", samples)
    dataset = Eagle3SampleFileDataset(tmp_path / "store", hidden_states_dtype=torch.float16)
    assert dataset[0]["hidden_states"].dtype == torch.float16
    with pytest.raises(IntegrityError, match=r"70144\.0"):
        dataset[1]


def test_rows_longer_than_max_len_are_refused_and_never_cut(store: Path, make: SimpleNamespace) -> None:
    longest = max(len(sample.ids) for sample in make.samples()) - 1
    assert len(Eagle3SampleFileDataset(store, max_len=longest)) == 12
    with pytest.raises(
        UserError, match=rf"longer than {longest - 1} tokens; the longest: {longest}[\s\S]*train\.seq_len"
    ):
        Eagle3SampleFileDataset(store, max_len=longest - 1)


def test_a_transform_changes_the_input_states_only(store: Path) -> None:
    plain, noisy = (
        Eagle3SampleFileDataset(store),
        Eagle3SampleFileDataset(store, transform=AddUniformNoise(0.5)),
    )
    for i in range(len(plain)):
        before, after = plain[i], noisy[i]
        assert not torch.equal(before["hidden_states"], after["hidden_states"])
        assert all(torch.equal(before[name], after[name]) for name in before if name != "hidden_states")
        assert torch.equal(plain[i]["hidden_states"], before["hidden_states"])


def test_an_unweighted_index_gives_the_row_without_supervision(store: Path) -> None:
    dataset = Eagle3SampleFileDataset(store)
    item = dataset[pickle.loads(pickle.dumps(Unweighted(3)))]
    assert torch.equal(item["input_ids"], dataset[3]["input_ids"])
    assert not item["loss_mask"].any()
    assert item["row_index"].tolist() == [-1]


def test_an_index_outside_is_an_error_and_iteration_ends(store: Path) -> None:
    dataset = Eagle3SampleFileDataset(store)
    for i in (12, -1):
        with pytest.raises(IndexError):
            dataset[i]
    assert len(list(dataset)) == 12


def test_a_missing_store_names_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python extract\.py store="):
        Eagle3SampleFileDataset(tmp_path / "nothing")


def test_a_directory_of_something_else_is_refused_with_what_it_holds(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "token_freq.pt")
    with pytest.raises(
        UserError, match=r"neither a hidden-state store nor[\s\S]*token_freq\.pt[\s\S]*data_<n>\.pt"
    ):
        Eagle3SampleFileDataset(tmp_path)


@pytest.mark.parametrize("call", [{}, {"source": "a", "datapath": "b"}, {"datapath": "a", "file_list": []}])
def test_exactly_one_source_must_be_given(call: dict) -> None:
    with pytest.raises(ValueError, match="exactly one"):
        Eagle3SampleFileDataset(**call)


def test_the_calls_of_speculators_03_and_04_run(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = make.samples()
    make.v1(tmp_path / "v1", samples)
    make.v0(tmp_path / "v0", samples)
    by_path = Eagle3SampleFileDataset(
        max_len=64,
        datapath=str(tmp_path / "v1"),
        transform=AddUniformNoise(std=0.05),
        hidden_states_dtype=torch.bfloat16,
    )
    assert by_path[0]["hidden_states"].dtype == torch.bfloat16
    assert by_path.approx_lengths == [len(sample.ids) - 1 for sample in samples]
    files = [str(tmp_path / "v0" / f"data_{i}.pt") for i in (3, 1)]
    by_list = Eagle3SampleFileDataset(max_len=64, file_list=files, standardize_fn=standardize_data_v0)
    assert by_list[0]["hidden_states"].dtype == torch.float32
    expected = make.aligned(samples[3])
    assert torch.equal(by_list[0]["hidden_states"], expected["hidden_states"].float())
    assert torch.equal(by_list[0]["input_ids"], expected["input_ids"])


def test_shift_batch_aligns_and_keeps_nothing_else() -> None:
    batch = {
        "input_ids": torch.arange(10, 15),
        "hidden_states": torch.arange(5.0)[:, None],
        "verifier_last_hidden_states": torch.arange(50.0, 55.0)[:, None],
        "loss_mask": torch.tensor([0, 1, 0, 1, 1]),
        "position_ids": torch.arange(5),
        "lengths": torch.tensor([5]),
    }
    shifted = shift_batch(batch)
    assert shifted["input_ids"].tolist() == [11, 12, 13, 14]
    assert shifted["hidden_states"].flatten().tolist() == [0, 1, 2, 3]
    assert shifted["verifier_last_hidden_states"].flatten().tolist() == [51, 52, 53, 54]
    assert shifted["loss_mask"].tolist() == [1, 0, 1, 1]
    assert shifted["position_ids"].tolist() == [1, 2, 3, 4]
    assert shifted["lengths"].tolist() == [4]
    assert batch["lengths"].tolist() == [5]


def test_a_row_of_one_token_is_refused(tmp_path: Path, make: SimpleNamespace) -> None:
    samples = make.samples(3)
    samples[1] = type(samples[1])(samples[1].ids[:1], samples[1].mask[:1], samples[1].states[:1])
    make.v1(tmp_path, samples)
    with pytest.raises(IntegrityError, match=r"data_1\.pt leaves nothing after the shift; its tokens: 1"):
        Eagle3SampleFileDataset(tmp_path)


def test_items_do_not_hold_on_to_the_mapped_file(tmp_path: Path, make: SimpleNamespace) -> None:
    writers: list[Callable] = [make.store, make.v1, make.arrow]
    for number, write in enumerate(writers):
        write(tmp_path / str(number), make.samples())
        item = Eagle3SampleFileDataset(tmp_path / str(number))[0]
        for tensor in item.values():
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes + 4 * 3 * make.HIDDEN
