"""What the writer refuses, and that nothing of it reaches the index."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.store.writer import StoreWriter


@pytest.fixture
def writer(tmp_path: Path, fake: SimpleNamespace) -> Iterator[StoreWriter]:
    with StoreWriter(tmp_path / "store", fake.manifest(), fake.rows(), 40) as writer:
        yield writer


def shard_zero(writer: StoreWriter, fake: SimpleNamespace) -> list[list]:
    return [list(fake.states(row, torch.bfloat16)) for row in writer.shards[0]]


def refused(writer: StoreWriter, states: list[list], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        writer.write_shard(0, [tuple(part) for part in states])
    assert (writer.path / "index.jsonl").read_bytes() == b""
    assert not list((writer.path / "shards").iterdir())


def test_states_of_other_tokens_are_refused_with_the_position(
    writer: StoreWriter, fake: SimpleNamespace
) -> None:
    states = shard_zero(writer, fake)
    states[1][3] = states[1][3].clone()
    states[1][3][2] += 1
    refused(writer, states, r"other tokens \(1 of \d+ differ\); position 2")


def test_states_shifted_by_one_token_are_refused(writer: StoreWriter, fake: SimpleNamespace) -> None:
    states = shard_zero(writer, fake)
    states[0][3] = states[0][3].roll(1)
    refused(writer, states, "other tokens")


@pytest.mark.parametrize("part", [1, 2, 3])
def test_every_part_must_have_the_rows_length(writer: StoreWriter, fake: SimpleNamespace, part: int) -> None:
    states = shard_zero(writer, fake)
    states[0][part] = states[0][part][:-1]
    refused(writer, states, "number of tokens|shape")


def test_a_capture_of_one_layer_instead_of_three_is_refused(
    writer: StoreWriter, fake: SimpleNamespace
) -> None:
    states = shard_zero(writer, fake)
    states[0][1] = states[0][1][:, : fake.HIDDEN]
    refused(writer, states, "aux states of row .* shape")


@pytest.mark.parametrize(
    ("value", "name"),
    [(float("nan"), "1 NaN in layer 4"), (float("inf"), "1 Inf in layer 4"), (-float("inf"), "1 Inf")],
)
def test_non_finite_aux_states_are_refused_with_count_and_layer(
    writer: StoreWriter, fake: SimpleNamespace, value: float, name: str
) -> None:
    states = shard_zero(writer, fake)
    states[0][1][1, fake.HIDDEN + 3] = value
    refused(writer, states, name)


def test_a_non_finite_last_state_is_refused(writer: StoreWriter, fake: SimpleNamespace) -> None:
    states = shard_zero(writer, fake)
    states[0][2][0, 0] = float("nan")
    refused(writer, states, "1 NaN in last state")


def test_an_all_zero_layer_and_an_all_zero_position_are_refused(
    writer: StoreWriter, fake: SimpleNamespace
) -> None:
    states = shard_zero(writer, fake)
    states[0][1][:, : fake.HIDDEN] = 0
    length = len(states[0][3])
    refused(writer, states, f"{length} of {length} positions all zero in layer 2")
    states = shard_zero(writer, fake)
    states[0][2][1] = 0
    refused(writer, states, "1 of .* positions all zero in last state")


def test_large_and_tiny_but_finite_values_pass(writer: StoreWriter, fake: SimpleNamespace) -> None:
    states = shard_zero(writer, fake)
    states[0][1][0] = 3.0e38
    states[0][1][1] = 1.0e-38
    writer.write_shard(0, [tuple(part) for part in states])


def test_another_dtype_is_refused(writer: StoreWriter, fake: SimpleNamespace) -> None:
    states = shard_zero(writer, fake)
    states[0][1] = states[0][1].float()
    refused(writer, states, r"dtype.*float32.*expected torch\.bfloat16")


def test_a_token_id_beyond_the_vocabulary_is_refused(tmp_path: Path, fake: SimpleNamespace) -> None:
    with StoreWriter(tmp_path / "store", fake.manifest(vocab_size=10), fake.rows(), 40) as writer:
        refused(writer, shard_zero(writer, fake), "token ids.*expected 0 to 9")


def test_a_row_whose_id_is_not_its_contents_is_refused(tmp_path: Path, fake: SimpleNamespace) -> None:
    rows = fake.rows()
    rows[0] = type(rows[0])(**{**rows[0].__dict__, "row_id": "0" * 64})
    with StoreWriter(tmp_path / "store", fake.manifest(), rows, 40) as writer:
        refused(writer, shard_zero(writer, fake), "not those its row_id was made of")


def test_rows_out_of_plan_are_a_programming_error(writer: StoreWriter, fake: SimpleNamespace) -> None:
    states = [fake.states(row, torch.bfloat16) for row in writer.shards[0]]
    with pytest.raises(ValueError, match="planned rows"):
        writer.write_shard(0, states[:-1])
    with pytest.raises(ValueError, match="planned rows"):
        writer.write_shard(0, states[::-1])
    writer.write_shard(0, states)
    with pytest.raises(ValueError, match="written already"):
        writer.write_shard(0, states)
    with pytest.raises(ValueError, match="not written yet"):
        writer.finish()


@pytest.mark.parametrize("allowed", [100, 2000])
def test_a_full_disk_names_file_and_errno_and_keeps_what_is_indexed(
    tmp_path: Path, fake: SimpleNamespace, allowed: int
) -> None:
    """A file size limit fails a write part way, as a full disk does."""
    path = tmp_path / "store"
    fake.write(path, fake.rows(), fake.manifest(), stop_before=1)
    before = fake.tree(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with StoreWriter(path, fake.manifest(), fake.rows(), 40) as writer:
            number, rows = next(writer.pending())
            resource.setrlimit(resource.RLIMIT_FSIZE, (allowed, limits[1]))
            with pytest.raises(UserError, match=f"00001.safetensors .errno {errno.EFBIG}"):
                writer.write_shard(number, [fake.states(row, torch.bfloat16) for row in rows])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert fake.tree(path) == before
    assert fake.write(path, fake.rows(), fake.manifest()).complete


def test_a_full_disk_while_indexing_cuts_the_index_back(
    tmp_path: Path, fake: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = tmp_path / "store", os.fsync
    with StoreWriter(path, fake.manifest(), fake.rows(), 40) as writer:
        number, rows = next(writer.pending())

        def full(descriptor: int) -> None:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("index.jsonl"):
                raise OSError(errno.ENOSPC, "No space left on device")
            fsync(descriptor)

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UserError, match=r"index\.jsonl .errno 28"):
            writer.write_shard(number, [fake.states(row, torch.bfloat16) for row in rows])
        assert (path / "index.jsonl").read_bytes() == b""
        assert next(writer.pending())[0] == number
