"""PAR, TRN, CKP, EXT and SEC cases that the data path alone decides: files, alignment, noise, packs."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.data import Eagle3SampleFileDataset, PackBatchSampler, build_noise
from eagle3lab.data.legacy import load_sample_file

CASES = Path(__file__).parent


def expected(case: str) -> Any:
    return json.loads((CASES / case / "expected.json").read_text())


def rows_of(sampler: PackBatchSampler) -> list[int]:
    return [row for pack in sampler for row in pack]


def samplers(lengths: list[int], max_len: int, ranks: int, **options: Any) -> list[PackBatchSampler]:
    return [PackBatchSampler(lengths, max_len, num_replicas=ranks, rank=r, **options) for r in range(ranks)]


def test_par_01_ranks_are_disjoint_and_complete() -> None:
    case = expected("PAR-01")
    ranks = samplers([10] * case["rows"], 10 * case["batch"], case["ranks"])
    seen = [rows_of(sampler) for sampler in ranks]
    assert sorted(seen[0] + seen[1]) == list(range(case["rows"]))
    assert [len(sampler) for sampler in ranks] == [2, 2]
    assert all(len(pack) == case["batch"] for sampler in ranks for pack in sampler)


def test_par_02_ranks_have_equal_counts_and_what_is_left_out_is_counted() -> None:
    case = expected("PAR-02")
    lengths = [30, 400, 12, 256, 77, 390, 301]
    training = samplers(lengths, 400, case["ranks"])
    packs = len(training[0].plan(0))
    assert {len(list(sampler)) for sampler in training} == {packs // 2}
    assert training[0].num_left_out == packs % 2
    validation = samplers([400] * case["rows"], 400, case["ranks"], shuffle=False, drop_last=False)
    assert {len(list(sampler)) for sampler in validation} == {4}


def test_par_02_the_padded_row_does_not_count(tmp_path: Path) -> None:
    for i in range(7):
        write_row(tmp_path / f"hs_{i}.safetensors", list(range(10)), [0] * 5 + [1] * 5)
    dataset = Eagle3SampleFileDataset(tmp_path)
    weighted = []
    for sampler in samplers(dataset.lengths, 9, 2, shuffle=False, drop_last=False):
        weighted += [int(dataset[row]["loss_mask"].sum()) for row in rows_of(sampler)]
    assert sorted(weighted) == [0] + [5] * 7


def test_par_03_a_remainder_is_handled_per_global_batch() -> None:
    case = expected("PAR-03")
    lengths = [10] * case["rows"]
    ranks = samplers(lengths, 10 * case["micro_batch"], case["data_parallel"], shuffle=False)
    assert {str(r): next(iter(sampler)) for r, sampler in enumerate(ranks)} == case["step_0"]
    plan, left_out = ranks[0].plan(0), ranks[0].num_left_out
    assert [row for pack in plan[-left_out:] for row in pack] == case["step_1_remaining_rows"]
    shuffled = samplers(lengths, 10 * case["micro_batch"], case["data_parallel"])
    for epoch in (0, 1):
        for sampler in shuffled:
            sampler.set_epoch(epoch)
        rows = [row for sampler in shuffled for row in rows_of(sampler)]
        assert len(rows) == len(set(rows)) == case["global_batch"]


def test_par_05_every_epoch_has_its_own_order_shared_by_the_ranks() -> None:
    case = expected("PAR-05")
    orders = []
    for _repeat in (0, 1):
        epochs = []
        for epoch in range(case["epochs"]):
            ranks = samplers([10] * case["rows"], 20, 2)
            for sampler in ranks:
                sampler.set_epoch(epoch)
            one, two = map(rows_of, ranks)
            assert sorted(one + two) == list(range(case["rows"]))
            epochs.append((one, two, ranks[0].plan(epoch)))
        orders.append(epochs)
    assert orders[0] == orders[1]
    assert len({str(order) for *_, order in orders[0]}) == case["epochs"]
    assert len({str(sorted(map(sorted, order))) for *_, order in orders[0]}) == case["epochs"]
    resumed = samplers([10] * case["rows"], 20, 2)[0]
    resumed.set_epoch(2, start_pack=0)
    assert rows_of(resumed) == orders[0][2][0]


def test_trn_07_rows_without_supervised_tokens_are_reported() -> None:
    assert Eagle3SampleFileDataset(CASES / "TRN-07").unsupervised_rows() == [0, 1]


def test_trn_12_noise_has_its_named_width_and_leaves_the_targets() -> None:
    bounds = expected("TRN-12")["uniform_0.05"]
    noise = build_noise(NoiseConfig(NoiseKind.uniform, 0.05))
    assert noise is not None
    for length in expected("TRN-12")["independent_of_length"]:
        width = bounds["samples"] // length + 1
        zeros = {"hidden_states": torch.zeros(1, length, width)}
        drawn = noise(zeros, torch.Generator().manual_seed(length))["hidden_states"]
        assert float(drawn.abs().max()) <= torch.tensor(0.05).item()
        for name, value in (("mean_abs", drawn.abs().mean()), ("std", drawn.std()), ("mean", drawn.mean())):
            assert bounds[name][0] <= float(value) <= bounds[name][1], name
    file = CASES / "TRN-12" / "row.safetensors"
    before = file.read_bytes()
    plain, noisy = Eagle3SampleFileDataset([file]), Eagle3SampleFileDataset([file], transform=noise)
    changed = {name for name, tensor in plain[0].items() if not torch.equal(tensor, noisy[0][name])}
    assert changed == {"hidden_states"}
    assert file.read_bytes() == before
    assert build_noise(NoiseConfig(NoiseKind.uniform, 0.0)) is None
    with pytest.raises(UserError, match=r"-0\.1"):
        build_noise(NoiseConfig(NoiseKind.uniform, -0.1))


def test_trn_16_too_few_rows_for_the_ranks_are_an_error() -> None:
    assert PackBatchSampler([10, 20, 30], 8 * 30).num_updates == 1
    with pytest.raises(UserError, match="1 rows make 1 packs"):
        PackBatchSampler([10], 30, num_replicas=2)


@pytest.mark.parametrize("row", ["row_a", "row_b_mask_to_the_end"])
def test_trn_17_each_position_has_its_token_state_target_and_mask(tmp_path: Path, row: str) -> None:
    case = expected("TRN-17")[row]
    ids = case["input_ids"]
    write_row(tmp_path / "hs_0.safetensors", ids, case["loss_mask_of_tokens"])
    item = Eagle3SampleFileDataset(tmp_path)[0]
    aligned = case["aligned_positions"]
    assert len(item["input_ids"]) == len(aligned)
    for position in aligned:
        at = position["position"]
        assert int(item["input_ids"][at]) == position["token_in"]
        assert float(item["hidden_states"][at, 0]) == position["hidden_of_token"]
        assert float(item["verifier_last_hidden_states"][at, 0]) == int(position["target"].split()[-1])
    assert item["loss_mask"].nonzero().flatten().tolist() == case["supervised_positions_step_0"]


def test_trn_18_updates_are_counted_in_packs() -> None:
    case = expected("TRN-18")
    sampler = PackBatchSampler(
        case["row_lengths"], case["pack_length"], packs_per_update_per_rank=case["accumulate"]
    )
    for epoch in range(case["epochs"]):
        sampler.set_epoch(epoch)
        assert len(sampler.plan(epoch)) == case["min_packs"]
        assert sampler.num_updates == case["updates_per_epoch"]
        assert sorted(rows_of(sampler)) == list(range(case["rows_seen_per_epoch"]))
    assert sum(sampler.num_updates_in(epoch) for epoch in range(case["epochs"])) == case["total_updates"]


def test_ckp_01_a_resume_in_mid_epoch_reads_the_rest_of_the_same_order() -> None:
    case = expected("CKP-01")
    whole, resumed = (PackBatchSampler([10] * case["rows"], 10, seed=0) for _ in range(2))
    first = rows_of(whole)
    resumed.set_epoch(0, start_pack=case["resume_from"])
    assert first[: case["resume_from"]] + rows_of(resumed) == first
    assert sorted(first) == list(range(case["rows"]))
    whole.set_epoch(1)
    resumed.set_epoch(1)
    assert rows_of(resumed) == rows_of(whole) != first


def test_ckp_05_a_resume_on_fewer_ranks_goes_on_with_the_next_rows() -> None:
    case = expected("CKP-05")
    saved, lengths = case["saved"], [10] * 40
    batch = saved["batch_per_rank"]
    two = samplers(lengths, 10 * batch, saved["ranks"], packs_per_update_per_rank=saved["accumulate"])
    plan = two[0].plan(0)
    used = saved["step"] * two[0].packs_per_update
    assert sum(map(len, plan[:used])) == saved["rows_used"]
    one = PackBatchSampler(lengths, 10 * batch, packs_per_update_per_rank=2)
    one.set_epoch(0, start_pack=used)
    rest = list(one)
    assert rest == plan[used:]
    assert [row for pack in rest[:2] for row in pack] == one.rows_of_update(saved["step"])


def test_ext_05_a_file_marked_as_normed_is_refused() -> None:
    with pytest.raises(IntegrityError, match=r"hs_normed\.safetensors.*after_final_norm"):
        load_sample_file(CASES / "EXT-05" / "hs_normed.safetensors")
    states = load_sample_file(CASES / "EXT-05" / "hs_raw.safetensors")["hidden_states"]
    assert torch.equal(states[-1], torch.full_like(states[-1], expected("EXT-05")["last_slot_value"]))


def test_ext_08_non_finite_states_are_refused_with_file_count_and_slot(tmp_path: Path) -> None:
    case = expected("EXT-08")
    for i in range(4):
        tensors = load_file(CASES / "EXT-08" / f"hs_{i}.safetensors")
        mask = torch.ones_like(tensors["token_ids"])
        save_file({**tensors, "loss_mask": mask}, tmp_path / f"hs_{i}.safetensors")
    dataset = Eagle3SampleFileDataset(tmp_path)
    for name, what in case["rejected"].items():
        count, slot = what.split(", ")
        with pytest.raises(IntegrityError, match=rf"{name}\.safetensors: {count} in {slot}"):
            dataset[int(name[3:])]
    for name in case["accepted"]:
        dataset[int(name[3:])]
    item = dataset[2]
    states = [item[name] for name in ("hidden_states", "verifier_last_hidden_states")]
    assert {part.dtype for part in states} == {torch.bfloat16}
    assert max(float(part.max()) for part in states) == case["hs_2_value_as_bf16"]
    with pytest.raises(IntegrityError, match="beyond the range of float16"):
        Eagle3SampleFileDataset(tmp_path, hidden_states_dtype=torch.float16)[2]


def test_ext_11_states_of_other_rows_of_the_same_length_are_an_error(tmp_path: Path) -> None:
    from datasets import Dataset

    files = sorted((CASES / "EXT-11" / "output_of_v1").glob("hs_*.safetensors"))
    ids = [load_file(file)["token_ids"].tolist() for file in files]
    rows = [{"input_ids": some, "loss_mask": [1] * len(some), "seq_len": len(some)} for some in reversed(ids)]
    Dataset.from_list(rows).save_to_disk(str(tmp_path / "data"))
    (tmp_path / "data" / "hidden_states").mkdir()
    for file in files:
        (tmp_path / "data" / "hidden_states" / file.name).write_bytes(file.read_bytes())
    with pytest.raises(IntegrityError, match="2 of 2 files do not belong to their rows"):
        Eagle3SampleFileDataset(tmp_path / "data")


def test_ext_13_a_file_that_is_still_being_written_is_never_read_short(tmp_path: Path) -> None:
    source, target = CASES / "EXT-13" / "whole.safetensors", tmp_path / "hs_0.safetensors"
    writer = subprocess.Popen(
        [sys.executable, str(CASES / "EXT-13" / "slow_writer.py"), str(source), str(target), "1"]
    )
    deadline = time.monotonic() + 20
    while not (target.exists() and target.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    with pytest.raises(IntegrityError, match="not a whole safetensors file"):
        load_sample_file(target)
    assert writer.wait(timeout=20) == 0
    found, whole = load_sample_file(target), load_file(source)
    assert torch.equal(torch.stack(found["hidden_states"], dim=1), whole["hidden_states"])


@pytest.mark.parametrize("name", ["data.npz", "draft_with_code.pt", "object_array.npy", "plain.pkl"])
def test_sec_01_files_that_could_run_code_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=name):
        Eagle3SampleFileDataset([CASES / "SEC-01" / name])
    assert list(tmp_path.iterdir()) == []


def test_sec_01_a_harmless_file_of_tensors_loads() -> None:
    assert load_sample_file(CASES / "SEC-01" / "harmless.pt")["input_ids"].tolist() == [0, 1, 2, 3]


def write_row(path: Path, ids: list[int], mask: list[int]) -> None:
    """A sample whose every state equals its token id, so that alignment can be read off."""
    states = torch.tensor(ids, dtype=torch.float32)[:, None, None].expand(len(ids), 4, 8).contiguous() + 0.0
    tensors = {"token_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}
    save_file({"hidden_states": states.clamp(min=0.5), **tensors}, path)
