"""Files and layouts of speculators 0.3 to 0.9: finding them, splitting them, giving them one form.

v0 `.pt`:  hidden_state [T, 3 * hidden], target [T, hidden], input_ids [T], loss_mask [T]
v1 `.pt`:  hidden_states: list of n + 1 tensors [T, hidden], the last one the verifier's last state
0.5-0.9 :  hs_{i}.safetensors {hidden_states [T, n + 1, hidden], token_ids [T]}, and row i of an Arrow
           dataset {input_ids, loss_mask, seq_len} one directory up
"""

from __future__ import annotations

import pickle
import random
import re
import zipfile
from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3lab.config.errors import IntegrityError, Problem, UserError

StandardizeFn = Callable[[dict[str, Any]], dict[str, Any]]

_DATA_FILE = re.compile(r"(?:data_(0|[1-9]\d*)\.pt|hs_(0|[1-9]\d*)\.safetensors)")


def file_number(path: Path) -> int | None:
    """The sample number in an exact data file name (data_7.pt, hs_7.safetensors), else None."""
    match = _DATA_FILE.fullmatch(path.name)
    return int(match[1] or match[2]) if match else None


def list_files(path: str | PathLike[str]) -> list[Path]:
    """All data files under a directory, by directory and then by number.

    Only exact names count: data_<n>.pt and hs_<n>.safetensors. A token_freq.pt, a temporary file or
    hs_04.safetensors is none.
    """
    found = [
        (file.parent, number, file.name, file)
        for file in Path(path).rglob("*")
        if (number := file_number(file)) is not None and file.is_file()
    ]
    return [file for *_, file in sorted(found)]


def split_files(
    datapath: str | PathLike[str], ratio: float = 0.9, seed: int = 0
) -> tuple[list[Path], list[Path]]:
    """Training and validation files: `ratio` of a shuffled `list_files`, and the rest.

    The shuffle has its own generator; the global `random` state is not touched.
    """
    files = list_files(datapath)
    random.Random(seed).shuffle(files)
    num_train = int(len(files) * ratio)
    return files[:num_train], files[num_train:]


def standardize_data_v0(data: dict[str, Any]) -> dict[str, Any]:
    """v0 keys to the common ones; nothing is copied."""
    return {
        "hidden_states": data["hidden_state"],  # shape: [T, 3 * hidden_size]
        "input_ids": data["input_ids"],
        "verifier_last_hidden_states": data["target"],  # shape: [T, hidden_size]
        "loss_mask": data["loss_mask"],
    }


def standardize_data_v1(data: dict[str, Any]) -> dict[str, Any]:
    """v1 keys to the common ones: all states but the last are joined along the hidden dimension."""
    return {
        "hidden_states": torch.cat(
            list(data["hidden_states"][:-1]), dim=-1
        ),  # shape: [T, n_aux * hidden_size]
        "input_ids": data["input_ids"],
        "verifier_last_hidden_states": data["hidden_states"][-1],  # shape: [T, hidden_size]
        "loss_mask": data["loss_mask"],
    }


def load_sample_file(path: Path) -> dict[str, Any]:
    """The tensors of one .pt or .safetensors sample file, memory-mapped, with v0 or v1 keys.

    No code in a file is ever run: .pt is read with weights_only=True and refused otherwise, pickles and
    numpy files are not read at all. Raises IntegrityError with the file's name for what cannot be read,
    UserError for another kind of file.
    """
    if path.suffix == ".pt":
        return _load_pt(path)
    if path.suffix == ".safetensors":
        return _load_safetensors(path)
    raise UserError(
        Problem(
            f"{path} is no sample file", value=path.suffix, expected=".pt or .safetensors with plain tensors"
        )
    )


def sample_length(path: Path) -> int:
    """Exact number of tokens T of one sample file, from its header where the format has one."""
    if path.suffix == ".safetensors":
        with _open_safetensors(path) as file:
            if "token_ids" in file.keys():  # noqa: SIM118 - a safetensors handle is no mapping
                return _only_size(file.get_slice("token_ids").get_shape(), path)
    data = load_sample_file(path)
    if not isinstance(data.get("input_ids"), torch.Tensor):
        held = sorted(map(str, data))
        raise IntegrityError(Problem(f"{path} holds no token ids", held, "input_ids or token_ids"))
    return _only_size(data["input_ids"].shape, path)


def _only_size(shape: Sequence[int], path: Path) -> int:
    if len(shape) != 1:
        raise IntegrityError(Problem(f"{path}: shape of the token ids", list(shape), "[T]"))
    return int(shape[0])


def _load_pt(path: Path) -> dict[str, Any]:
    try:
        # files from before torch's zip format cannot be mapped; they are read whole, as safely
        data = torch.load(path, mmap=zipfile.is_zipfile(path), weights_only=True, map_location="cpu")
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise IntegrityError(
            Problem(
                f"{path} is refused: it is not a whole file of plain tensors ({reason})",
                expected="a .pt file that torch.load(weights_only=True) reads; nothing in it was run",
            )
        ) from error
    if not isinstance(data, dict):
        raise IntegrityError(Problem(f"{path} holds a {type(data).__name__}", expected="a dict of tensors"))
    return data


def _load_safetensors(path: Path) -> dict[str, Any]:
    with _open_safetensors(path) as file:
        origin = file.metadata() or {}
        data = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    states = data.get("hidden_states")
    if states is None or states.dim() != 3 or "token_ids" not in data:
        shapes = {name: list(tensor.shape) for name, tensor in data.items()}
        raise IntegrityError(
            Problem(f"{path}: tensors", shapes, expected="hidden_states [T, n + 1, hidden] and token_ids [T]")
        )
    if origin.get("last_slot", "before_final_norm") != "before_final_norm":
        raise IntegrityError(
            Problem(
                f"{path}: its last state was taken",
                value=origin["last_slot"],
                expected="before_final_norm: the final norm is applied in training",
            )
        )
    if not states.dtype.is_floating_point or states.dtype.itemsize < 2:
        raise UserError(
            Problem(
                f"{path}: dtype of hidden_states", str(states.dtype), expected="bfloat16, float16 or float32"
            )
        )
    sample = {"input_ids": data["token_ids"], "hidden_states": list(states.unbind(dim=1))}
    return sample | {name: data[name] for name in ("loss_mask",) if name in data}


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise IntegrityError(
            Problem(f"{path} is refused: it is not a whole safetensors file ({error})")
        ) from error
