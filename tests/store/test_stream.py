"""The streamed writer against safetensors' own: the same bytes, and a checksum of them."""

from __future__ import annotations

import hashlib

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.store.stream import write_safetensors


def make_tensors(num_tokens):
    generator = torch.Generator().manual_seed(num_tokens)
    states = torch.randn(num_tokens, 12, generator=generator)
    return {
        "input_ids": torch.arange(num_tokens),
        "loss_mask": torch.ones(num_tokens, dtype=torch.uint8),
        "verifier_last_hidden_states": states.to(torch.float8_e4m3fn),
        "aux_hidden_states": states.to(torch.bfloat16),
        "aux_scales": torch.rand(num_tokens, 3, generator=generator),
    }


@pytest.mark.parametrize("num_tokens", [1, 7, 300])
@pytest.mark.parametrize("num_pieces", [1, 3])
def test_pieces_make_the_file_that_safetensors_writes(tmp_path, num_tokens, num_pieces):
    tensors = make_tensors(num_tokens)
    metadata = {"origin": '{"name": "\u00e9"}'}
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    pieces = {name: list(tensor.tensor_split(num_pieces)) for name, tensor in tensors.items()}
    digest = write_safetensors(tmp_path / "ours", pieces, metadata)
    content = (tmp_path / "ours").read_bytes()
    assert content == (tmp_path / "theirs").read_bytes()
    assert digest == hashlib.sha256(content).hexdigest()


def test_a_view_with_gaps_is_written_as_what_it_shows(tmp_path):
    states = torch.randn(5, 4, 6)
    view = states[:, :3].reshape(5, -1)
    write_safetensors(tmp_path / "file", {"x": [view]}, {})
    assert torch.equal(load_file(tmp_path / "file")["x"], view)


def test_more_than_one_chunk_is_written_and_hashed_whole(tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3lab.store.stream._CHUNK_BYTES", 1000)
    monkeypatch.setattr("eagle3lab.store.stream._FLUSH_BYTES", 4096)
    tensors = {"x": torch.randn(4000)}
    digest = write_safetensors(tmp_path / "ours", {"x": [tensors["x"]]}, {"a": "b"})
    save_file(tensors, tmp_path / "theirs", metadata={"a": "b"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == hashlib.sha256((tmp_path / "theirs").read_bytes()).hexdigest()


@pytest.mark.parametrize("other", [torch.zeros(2, 3, dtype=torch.bfloat16), torch.zeros(2, 4)])
def test_pieces_that_do_not_belong_together_are_refused(tmp_path, other):
    with pytest.raises(ValueError, match="x has pieces"):
        write_safetensors(tmp_path / "file", {"x": [torch.zeros(2, 3), other]}, {})
