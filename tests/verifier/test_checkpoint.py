from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.verifier.checkpoint import tensor_index, weight_fingerprint

SINGLE = "model.safetensors"
Make = Callable[..., Path]
Tensors = dict[str, Tensor]


def test_header_is_read_as_written(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    held = tensor_index(make_checkpoint({SINGLE: edge_tensors}))
    assert {n: e.shape for n, e in held.items()} == {n: tuple(t.shape) for n, t in edge_tensors.items()}
    entry = held["model.norm.weight"]
    raw = entry.file.read_bytes()[entry.start : entry.end]
    assert raw == edge_tensors["model.norm.weight"].numpy().tobytes()


def test_fingerprint_tells_checkpoints_of_the_same_shape_apart(
    make_checkpoint: Make, edge_tensors: Tensors
) -> None:
    first = weight_fingerprint(make_checkpoint({SINGLE: edge_tensors}, name="a"))
    assert weight_fingerprint(make_checkpoint({SINGLE: edge_tensors}, name="b")) == first
    changed = {n: t.clone() for n, t in edge_tensors.items()}
    changed["model.layers.0.mlp.down_proj.weight"][0, 3] += 1e-3
    assert weight_fingerprint(make_checkpoint({SINGLE: changed}, name="c")) != first
    swapped = dict(edge_tensors)
    names = ("model.embed_tokens.weight", "lm_head.weight")
    swapped[names[0]], swapped[names[1]] = edge_tensors[names[1]], edge_tensors[names[0]]
    assert weight_fingerprint(make_checkpoint({SINGLE: swapped}, name="d")) != first


def test_fingerprint_does_not_depend_on_the_shards(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    names = list(edge_tensors)
    shards = {f"part{i}.safetensors": {n: edge_tensors[n]} for i, n in enumerate(names)}
    whole = make_checkpoint({SINGLE: edge_tensors}, name="whole")
    split = make_checkpoint(shards, index=True, name="split")
    assert weight_fingerprint(whole) == weight_fingerprint(split)


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(UserError, match=r"no \*\.safetensors.*pytorch_model\.bin.*pickled"):
        tensor_index(tmp_path)


def test_missing_shards_are_named(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    files = {
        f"model-0000{i}-of-00004.safetensors": {n: t} for i, (n, t) in enumerate(edge_tensors.items(), 1)
    }
    directory = make_checkpoint(files, index=True)
    (directory / "model-00003-of-00004.safetensors").unlink()
    with pytest.raises(UserError, match=r"names 1 files.*model-00003-of-00004"):
        tensor_index(directory)
    (directory / "model.safetensors.index.json").unlink()
    with pytest.raises(UserError, match=r"holds 3 of 4 shards: 'number 3'; expected the complete"):
        tensor_index(directory)


def test_index_that_names_the_wrong_file(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    directory = make_checkpoint({"a.safetensors": edge_tensors}, index=True)
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "a.safetensors", "x": "a.safetensors"}}))
    with pytest.raises(IntegrityError, match="do not hold them: 'x'"):
        tensor_index(directory)


def test_a_header_or_an_index_nested_without_end_is_damage(tmp_path: Path) -> None:
    header = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(IntegrityError, match="unreadable safetensors header"):
        tensor_index(tmp_path)
    file.unlink()
    (tmp_path / "model.safetensors.index.json").write_bytes(header)
    with pytest.raises(IntegrityError, match="is not an index"):
        tensor_index(tmp_path)


def test_one_tensor_in_two_files(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    directory = make_checkpoint({"a.safetensors": edge_tensors, "b.safetensors": edge_tensors})
    with pytest.raises(UserError, match="two files"):
        tensor_index(directory)


def test_single_file_wins_over_others_beside_it(make_checkpoint: Make, edge_tensors: Tensors) -> None:
    files = {SINGLE: edge_tensors, "consolidated.safetensors": edge_tensors}
    assert len(tensor_index(make_checkpoint(files))) == len(edge_tensors)


@pytest.mark.parametrize("cut", [0, 5, 40, -1])
def test_cut_file_is_an_integrity_error(cut: int, tmp_path: Path) -> None:
    file = tmp_path / SINGLE
    save_file({"w": torch.zeros(100)}, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(IntegrityError):
        tensor_index(tmp_path)


@pytest.mark.parametrize("file", [SINGLE, "model-00002-of-00002.safetensors"])
def test_a_link_to_nothing_is_a_missing_file(file: str, tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4)}, tmp_path / "model-00001-of-00002.safetensors")
    (tmp_path / file).symlink_to(tmp_path / "blobs" / "gone")
    with pytest.raises(UserError, match=rf"links to nothing.*{file}.*\n.*download the missing files"):
        tensor_index(tmp_path)


def test_lfs_pointer_is_recognised(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(IntegrityError, match="git lfs pull"):
        tensor_index(tmp_path)
