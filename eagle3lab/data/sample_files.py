"""A list of older sample files as a source of rows, with the checks those files never had."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.data.legacy import (
    StandardizeFn,
    file_number,
    list_files,
    load_sample_file,
    sample_length,
    standardize_data_v0,
    standardize_data_v1,
)
from eagle3lab.data.shift import STATES
from eagle3lab.store.checks import check_tokens, check_values

_KNOWN_FORMS = (standardize_data_v0, standardize_data_v1)
STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
_DTYPE_WORDS = "bfloat16, float16, float32 or float64"


class SampleFiles:
    """Rows read from .pt or hs_*.safetensors files, in the given order.

    root: a directory (its `list_files`) or explicit files. Loss masks come from the file or, for
    hs_<n>.safetensors, from row n of the Arrow dataset that lies in or above the files' directory.
    `lengths` are the exact T of every file. Raises UserError when nothing is found, Arrow rows lack
    their file, or a mask is missing; IntegrityError for damaged files or states of other tokens.
    """

    def __init__(self, root: Path | Sequence[Path], standardize_fn: StandardizeFn) -> None:
        self.standardize_fn = standardize_fn
        self._masks: dict[Path, Any] = {}  # directory of hs files -> its Arrow dataset
        if isinstance(root, Path) and not root.exists():
            raise UserError(Problem("no such directory of sample files", str(root)))
        if isinstance(root, Path) and root.is_dir():
            self.files = _found_files(root)
            self._open_masks()
            self._check_nothing_missing()
        else:
            self.files = [Path(file) for file in ([root] if isinstance(root, Path) else root)]
            self._open_masks()
        self.lengths = [sample_length(file) for file in self.files]
        self._check_arrow_tokens()
        self._shape: tuple[int, int] | None = None  # widths of the first file; all others must agree
        self._shape = self._widths(self._standardized(0), self.files[0]) if self.files else None

    @property
    def num_aux_states(self) -> int:
        """Aux states per token in every file."""
        assert self._shape is not None
        return self._shape[0] // self._shape[1]

    @property
    def hidden_size(self) -> int:
        """Width of one state in every file."""
        assert self._shape is not None
        return self._shape[1]

    def read_tokens(self, i: int) -> tuple[Tensor, Tensor]:
        """Ids [T] int64 and mask [T] uint8 of one file, without its states."""
        data = self._load(self.files[i])
        return data["input_ids"].long().clone(), data["loss_mask"].to(torch.uint8).clone()

    def read(self, i: int) -> dict[str, Tensor]:
        """One row before the shift: input_ids, loss_mask [T] and both kinds of states [T, ...]."""
        data = self._standardized(i)
        path, length = self.files[i], self.lengths[i]
        sizes = {name: len(tensor) for name, tensor in data.items()}
        if set(sizes.values()) != {length}:
            raise IntegrityError(Problem(f"{path}: lengths differ", sizes, expected=f"{length} for all"))
        widths = self._widths(data, path)
        if widths != self._shape:
            raise IntegrityError(
                Problem(f"{path}: widths of the states", widths, expected=f"{self._shape} as before")
            )
        slots = [f"slot {k}" for k in range(self.num_aux_states + 1)]
        aux = data["hidden_states"].reshape(length, self.num_aux_states, self.hidden_size)
        check_values(aux, slots[:-1], str(path))
        check_values(data["verifier_last_hidden_states"].unsqueeze(1), slots[-1:], str(path))
        # copied: the tensors are views into the mapped file, writable within this process
        return {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in data.items()}

    def read_checked(self, i: int) -> None:
        """Read row i; every read of these files checks everything."""
        self.read(i)

    def read_mask(self, i: int) -> Tensor:
        """The loss mask of one file, [T] uint8."""
        own = self.standardize_fn not in _KNOWN_FORMS
        mask: Tensor = (self._standardized(i) if own else self._load(self.files[i]))["loss_mask"]
        return mask.to(torch.uint8)

    def perhaps_unsupervised(self) -> list[int]:
        """Older files do not count their supervised tokens: any row may have none."""
        return list(range(len(self.files)))

    def _standardized(self, i: int) -> dict[str, Tensor]:
        data = self._load(self.files[i])
        standardize = self.standardize_fn
        if standardize is standardize_data_v1 and {"hidden_state", "target"} <= data.keys():
            standardize = standardize_data_v0
        try:
            sample = standardize(data)
            sample = {name: sample[name] for name in ("input_ids", "loss_mask", *STATES)}
        except (KeyError, TypeError, IndexError, ValueError, RuntimeError) as error:
            what = f"{self.files[i]} is not of the form that {standardize.__name__} reads ({error!r})"
            raise IntegrityError(Problem(what, sorted(map(str, data)))) from error
        for name in STATES:
            if not (_is_plain(sample[name]) and sample[name].dtype in STATE_DTYPES):
                said = _said(sample[name])
                raise IntegrityError(Problem(f"{self.files[i]}: {name}", said, f"a tensor of {_DTYPE_WORDS}"))
        return sample

    def _load(self, path: Path) -> dict[str, Any]:
        data = load_sample_file(path)
        arrow_row = self._arrow_row(path)
        if arrow_row is not None and "loss_mask" not in data:
            data["loss_mask"] = _column(arrow_row, "loss_mask", path)
        if "loss_mask" not in data and self.standardize_fn in _KNOWN_FORMS:
            expected = "loss_mask in the file, or the Arrow dataset written with hs_*.safetensors"
            raise UserError(Problem(f"{path} has no loss mask", expected=expected))
        if self.standardize_fn in _KNOWN_FORMS:
            _check_ids_and_mask(data["input_ids"], data["loss_mask"], path)
        return data

    def _widths(self, data: dict[str, Tensor], path: Path) -> tuple[int, int]:
        shapes = {name: list(data[name].shape) for name in STATES}
        aux, last = (shape[-1] if shape else 0 for shape in shapes.values())
        if any(len(shape) != 2 for shape in shapes.values()) or not last or aux % last:
            raise IntegrityError(Problem(f"{path}: shapes", shapes, "[T, n * hidden] and [T, hidden]"))
        return aux, last

    def _open_masks(self) -> None:
        for directory in sorted({file.parent for file in self.files if file.suffix == ".safetensors"}):
            for candidate in (directory, directory.parent):
                if (candidate / "dataset_info.json").is_file() and (candidate / "state.json").is_file():
                    self._masks[directory] = _load_arrow(candidate)
                    break

    def _arrow_row(self, path: Path) -> dict[str, Any] | None:
        dataset, number = self._masks.get(path.parent), file_number(path)
        if dataset is None or number is None:
            return None
        if number >= len(dataset):
            raise IntegrityError(Problem(f"{path} has no row in its Arrow dataset of {len(dataset)} rows"))
        row: dict[str, Any] = dataset[number]
        return row

    def _check_nothing_missing(self) -> None:
        for directory, dataset in self._masks.items():
            present = {file_number(file) for file in self.files if file.parent == directory}
            missing = [n for n in range(len(dataset)) if n not in present]
            if missing:
                raise UserError(
                    Problem(
                        f"{len(missing)} of {len(dataset)} rows have no states in {directory}; the first",
                        value=f"hs_{missing[0]}.safetensors",
                        fix="extract them, or pass the files that exist as a list",
                    )
                )

    def _check_arrow_tokens(self) -> None:
        """Files are matched to Arrow rows by number alone, so hold their token ids against each other."""
        wrong: list[IntegrityError] = []
        for file in self.files:
            row = self._arrow_row(file)
            if row is None:
                continue
            try:
                found = load_sample_file(file)["input_ids"]
                check_tokens(_column(row, "input_ids", file), found, str(file))
            except IntegrityError as error:
                wrong.append(error)
        if wrong:
            what = f"{len(wrong)} of {len(self.files)} files do not belong to their rows"
            raise IntegrityError(Problem(what), *wrong[0].problems)


def _check_ids_and_mask(ids: Any, mask: Any, path: Path) -> None:
    """A mask of weights, or fractional ids, would be cut to whole numbers without a word."""
    if not _is_plain(ids) or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise IntegrityError(Problem(f"{path}: token ids", _said(ids), "whole numbers"))
    if not _is_plain(mask) or not bool(((mask == 0) | (mask == 1)).all()):
        raise IntegrityError(Problem(f"{path}: loss mask", None, "a tensor of 0 and 1"))
    if ids.dim() != 1 or ids.shape != mask.shape:
        shapes = {"input_ids": list(ids.shape), "loss_mask": list(mask.shape)}
        raise IntegrityError(Problem(f"{path}: lengths differ", shapes, "one length"))


def _is_plain(value: Any) -> bool:
    """Whether it is a tensor whose values are there: a sparse one, or one on the meta device, is none."""
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu"


def _said(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return str(value.dtype) if _is_plain(value) else f"{value.layout} on {value.device}"


def _found_files(root: Path) -> list[Path]:
    files = list_files(root)
    near = {path for suffix in (".pt", ".safetensors", ".tmp") for path in root.rglob(f"*{suffix}")}
    others = sorted(path.name for path in near - set(files))
    if not files:
        raise UserError(
            Problem(
                f"{root} is neither a hidden-state store nor a directory of sample files",
                value=others[:3] or None,
                expected="manifest.json, or files named data_<n>.pt or hs_<n>.safetensors",
                fix="pass files of other names as a list, or run python extract.py store=DIRECTORY",
            )
        )
    if others:
        what = f"{root}: {len(others)} files are no samples and are not read: {others[:3]}"
        warnings.warn(what, stacklevel=4)
    return files


def _column(row: dict[str, Any], name: str, path: Path) -> Tensor:
    """One list of an Arrow row, in the kind it has there: what is no whole number is seen later, and not cut."""
    try:
        return torch.tensor(row[name])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        what = f"the Arrow row of {path} has no usable {name}"
        raise IntegrityError(
            Problem(what, f"{type(error).__name__}: {error}", "a list of numbers")
        ) from error


def _load_arrow(directory: Path) -> Any:
    try:
        from datasets import load_from_disk
    except ImportError as error:
        what = f"{directory} is an Arrow dataset, which needs another package"
        raise UserError(Problem(what, fix="pip install datasets")) from error
    try:
        return load_from_disk(str(directory)).with_format(None)
    except Exception as error:  # Arrow's own kinds, and whatever its JSON files make of damage
        what = f"{directory} cannot be read as an Arrow dataset"
        raise IntegrityError(Problem(what, f"{type(error).__name__}: {error}")) from error
