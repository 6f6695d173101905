"""`Eagle3SampleFileDataset`: rows of a store, or of older sample files, as aligned training samples."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import Dataset

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.config.schema import Supervision
from eagle3lab.data.legacy import StandardizeFn, standardize_data_v1
from eagle3lab.data.noise import TransformTensors
from eagle3lab.data.packing import Unweighted
from eagle3lab.data.sample_files import SampleFiles
from eagle3lab.data.share import in_share
from eagle3lab.data.shift import LAST_KEPT, SCALES, STATES, Batch, shift_batch
from eagle3lab.data.supervision import apply_supervision
from eagle3lab.store import shards
from eagle3lab.store.manifest import check_layer_ids, is_store
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.shards import AUX, AUX_SCALES, INPUT_IDS, LAST, LAST_SCALES, LOSS_MASK

AnyPath = str | PathLike[str]
_NAMES = {  # in a store, in a sample
    INPUT_IDS: "input_ids",
    LOSS_MASK: "loss_mask",
    AUX: STATES[0],
    LAST: STATES[1],
    AUX_SCALES: STATES[0] + SCALES,
    LAST_SCALES: STATES[1] + SCALES,
    shards.LAST_KEPT: LAST_KEPT,
}


class _Source(Protocol):
    """Rows before the shift."""

    lengths: list[int]

    def read(self, i: int) -> dict[str, Tensor]: ...
    def read_checked(self, i: int) -> None: ...
    def read_mask(self, i: int) -> Tensor: ...
    def perhaps_unsupervised(self) -> list[int]: ...


class _StoreRows:
    """The rows of one split of a store, or a share of them, with a subset of its aux layers."""

    def __init__(
        self,
        reader: StoreReader,
        split: str | None,
        aux_layer_ids: Sequence[int] | None,
        raw: bool,
        data_share: float,
    ) -> None:
        self.reader = reader
        self.raw = raw
        indices = reader.indices(split) if split else list(range(len(reader)))
        self.indices = [i for i in indices if in_share(reader.rows[i].conversation_id, data_share)]
        self.lengths = [reader.rows[i].length for i in self.indices]
        self.columns: list[int] | None = None
        if aux_layer_ids is not None and tuple(aux_layer_ids) != reader.manifest.layer_ids:
            check_layer_ids(reader.manifest, aux_layer_ids)
            self.columns = [reader.manifest.layer_ids.index(k) for k in aux_layer_ids]

    def read(self, i: int) -> dict[str, Tensor]:
        raw = self.raw
        data = self.reader.read(self.indices[i], self.columns, copy=not raw, raw=raw, check=not raw)
        return {_NAMES[name]: tensor for name, tensor in data.items()}

    def read_checked(self, i: int) -> None:
        self.reader.read(self.indices[i], self.columns, copy=False)

    def read_mask(self, i: int) -> Tensor:
        return self.reader.read_mask(self.indices[i])

    def perhaps_unsupervised(self) -> list[int]:
        """Only a row with one supervised token or none can lose all of them to the shift."""
        return [i for i, row in enumerate(self.indices) if self.reader.rows[row].supervised <= 1]


class Eagle3SampleFileDataset(Dataset[Batch]):
    """Training samples of an EAGLE-3 draft, one row each, aligned by `shift_batch`.

    source: a store (directory or open StoreReader), or a directory or list of sample files written by
    speculators 0.3 to 0.9 (v0, v1, hs_*.safetensors with Arrow). Item i holds, with L = T - 1:
    input_ids [L] int64, hidden_states [L, n_aux * hidden], verifier_last_hidden_states [L, hidden],
    loss_mask [L] bool, position_ids [L] from 1, lengths [1] = L, row_index [1] = i.

    split: "train" or "validation" of a store (default: both). max_len: rows longer than this after the
    shift are an error; nothing is cut. aux_layer_ids: the store's layers to read (default: all).
    transform: applied before the shift. hidden_states_dtype: default as stored. raw: a store's states as they
    lie in its mapped files, not copied and their values not looked at, fp8 with hidden_states_scales [L, n] and
    verifier_last_hidden_states_scales [L, 1] beside it, last states that the store does not hold left out (see
    `shift.LAST_KEPT`; they are zeros in items that are not raw): for a collate function that copies them and a
    reader that passes packs through `data.raw`. supervision: which predictions the loss mask marks, see
    `apply_supervision`. data_share: of a store's conversations, see `in_share`.

    `datapath=` and `file_list=` are the names of speculators 0.3/0.4 for a directory and a list; with
    them hidden_states_dtype defaults to float32, as it did there.
    """

    def __init__(
        self,
        source: AnyPath | StoreReader | Sequence[AnyPath] | None = None,
        *,
        split: str | None = None,
        max_len: int | None = None,
        aux_layer_ids: Sequence[int] | None = None,
        transform: TransformTensors | None = None,
        hidden_states_dtype: torch.dtype | None = None,
        standardize_fn: StandardizeFn = standardize_data_v1,
        raw: bool = False,
        supervision: Supervision = Supervision.input_token,
        data_share: float = 1.0,
        datapath: AnyPath | None = None,
        file_list: Sequence[AnyPath] | None = None,
    ) -> None:
        given = [value for value in (source, datapath, file_list) if value is not None]
        if len(given) != 1:
            raise ValueError("give exactly one of source, datapath and file_list")
        if source is None and hidden_states_dtype is None:
            hidden_states_dtype = torch.float32
        if raw and (transform is not None or hidden_states_dtype is not None):
            raise ValueError("raw states are neither transformed nor cast before they are on the device")
        self.transform = transform
        self.max_len = max_len
        self.hidden_states_dtype = hidden_states_dtype
        self.supervision = supervision
        self._source = _open_source(given[0], split, aux_layer_ids, standardize_fn, raw, data_share)
        self.lengths = [length - 1 for length in self._source.lengths]
        _check_lengths(self.lengths, max_len, getattr(self._source, "files", range(len(self.lengths))))

    @property
    def approx_lengths(self) -> list[int]:
        """The name of `lengths` in speculators 0.3 to 0.9; here they are exact."""
        return self.lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def supervised_counts(self, i: int, ttt_steps: int) -> tuple[int, ...]:
        """Supervised tokens of row i at every TTT step: n_k is the sum of the shifted mask from k on."""
        mask = apply_supervision(self._source.read_mask(i), self.supervision)[1:]  # shape: [L]
        total = int(mask.sum())
        before = [0, *mask[: ttt_steps - 1].cumsum(0).tolist()]
        before += before[-1:] * (ttt_steps - len(before))
        return tuple(total - int(count) for count in before)

    def store_rows(self) -> list[int]:
        """The place of every row in the store's own list. Raises ValueError for sample files."""
        if not isinstance(self._source, _StoreRows):
            raise ValueError("older sample files are in no store")
        return list(self._source.indices)

    def check_row(self, i: int) -> None:
        """Read row i with every check there is. Raises IntegrityError when it is damaged."""
        self._source.read_checked(i)

    def unsupervised_rows(self) -> list[int]:
        """Rows without a supervised token after the shift: they cost compute and teach nothing."""
        by_input = self.supervision is Supervision.input_token
        rows = self._source.perhaps_unsupervised() if by_input else range(len(self))
        return [i for i in rows if self.supervised_counts(i, 1) == (0,)]

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        data: dict[str, Any] = self._source.read(int(index))
        if self.hidden_states_dtype is not None:
            for name in ("hidden_states", "verifier_last_hidden_states"):
                data[name] = _cast(data[name], self.hidden_states_dtype, f"row {index}: {name}")
        length = len(data["input_ids"])
        data["input_ids"] = data["input_ids"].long()
        data["loss_mask"] = apply_supervision(data["loss_mask"], self.supervision)
        data["lengths"] = torch.tensor([length], dtype=torch.long)
        data["position_ids"] = torch.arange(length, dtype=torch.long)
        if self.transform is not None:
            data = self.transform(data)
        sample = shift_batch(data)
        unweighted = isinstance(index, Unweighted)
        if unweighted:
            sample["loss_mask"] = torch.zeros_like(sample["loss_mask"])
        sample["row_index"] = torch.tensor([-1 if unweighted else int(index)], dtype=torch.long)
        return sample


def _open_source(
    given: Any,
    split: str | None,
    aux_layer_ids: Sequence[int] | None,
    standardize_fn: StandardizeFn,
    raw: bool,
    data_share: float,
) -> _Source:
    if isinstance(given, StoreReader):
        return _StoreRows(given, split, aux_layer_ids, raw, data_share)
    if isinstance(given, str | PathLike):
        path = Path(given)
        if is_store(path) or not path.exists():
            return _StoreRows(StoreReader(path), split, aux_layer_ids, raw, data_share)
        files = SampleFiles(path, standardize_fn)
    else:
        files = SampleFiles([Path(file) for file in given], standardize_fn)
    if split is not None:
        raise ValueError("older sample files carry no split: divide them with split_files")
    if data_share != 1:
        raise ValueError("older sample files name no conversations: pass a share of the files")
    if aux_layer_ids is not None and len(files.files) and len(aux_layer_ids) != files.num_aux_states:
        raise UserError(
            Problem(
                "older sample files do not name their layers, so all must be used; the files hold",
                value=files.num_aux_states,
                expected=f"{len(aux_layer_ids)} aux layers for draft.aux_layer_ids={list(aux_layer_ids)}",
                fix="draft.aux_layer_ids=[...] with one id for each of them",
            )
        )
    return files


def _cast(states: Tensor, dtype: torch.dtype, where: str) -> Tensor:
    cast = states.to(dtype)
    if dtype == torch.float16 and not bool(cast.isfinite().all()):
        raise IntegrityError(
            Problem(
                f"{where}: values beyond the range of float16",
                float(states.abs().max()),
                "bfloat16 or float32",
            )
        )
    return cast


def _check_lengths(lengths: Sequence[int], max_len: int | None, names: Sequence[object]) -> None:
    if lengths and min(lengths) < 1:
        shortest = lengths.index(min(lengths))
        what = f"row {names[shortest]} leaves nothing after the shift; its tokens"
        raise IntegrityError(Problem(what, lengths[shortest] + 1, "at least 2"))
    too_long = [length for length in lengths if max_len is not None and length > max_len]
    if too_long:
        raise UserError(
            Problem(
                f"{len(too_long)} of {len(lengths)} rows are longer than {max_len} tokens; the longest",
                value=max(too_long),
                expected=f"at most {max_len}",
                fix=f"train.seq_len={-(-max(too_long) // 128) * 128}, or extract with data.max_len={max_len}",
            )
        )
