"""Keys of what a draft of a store has seen, so that no draft is measured on what it was trained on.

`trained_on.keys` is written with the store and goes into every draft that is trained on it. Keys are hashes
of 8 bytes: they say whether a given prompt was there, and nothing else can be read from them. The file is in
the safetensors layout, but not named so: engines load every *.safetensors of a draft as weights.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.store.files import write_bytes
from eagle3lab.store.identity import PlannedRow, ids_sha256

TRAINED_ON_FILE = "trained_on.keys"
SERVED_PROMPTS = "served_prompts"
USER_TURNS = "user_turns"
_KEY_BYTES = 8


@dataclass(frozen=True)
class TrainedOn:
    """Sorted keys of the training split. Validation rows are not trained on and not among them."""

    served_prompts: NDArray[np.uint64]  # ids of every row up to its first supervised token
    user_turns: NDArray[np.uint64] | None  # text of every user turn; None where only ids were known

    def has_prompt(self, token_ids: Sequence[int]) -> bool:
        """Whether a row began with exactly this served prompt."""
        return _holds(self.served_prompts, prompt_key(token_ids))

    def has_user_turn(self, text: str) -> bool:
        """Whether a user said this, whatever the template, the system message and the turns before it."""
        return self.user_turns is not None and _holds(self.user_turns, text_key(text))


def prompt_key(token_ids: Sequence[int]) -> int:
    """Key of token ids, see `ids_sha256`."""
    return _key(ids_sha256(token_ids))


def text_key(text: str) -> int:
    """Key of a text without regard to case, white space and compatible forms of characters.

    Two texts have one key if they are a compatibility caseless match (Unicode, D146) after every run of white
    space became one space and those at the ends went.
    """
    folded = unicodedata.normalize("NFKD", unicodedata.normalize("NFD", text).casefold())
    folded = unicodedata.normalize("NFKD", folded.casefold())
    return _key(hashlib.sha256(" ".join(folded.split()).encode()).hexdigest())


def trained_on(rows: Iterable[PlannedRow], user_turns: Iterable[int] | None) -> TrainedOn:
    """Of the training rows among `rows`, and the `text_key`s of their conversations' user turns."""
    prompts = (prompt_key(_served_prompt(row)) for row in rows if row.split == "train" and any(row.loss_mask))
    return TrainedOn(_sorted(prompts), None if user_turns is None else _sorted(user_turns))


def write_trained_on(path: Path, keys: TrainedOn) -> None:
    """Write `path` at once or not at all; the same keys give the same bytes."""
    arrays = {SERVED_PROMPTS: keys.served_prompts}
    if keys.user_turns is not None:
        arrays[USER_TURNS] = keys.user_turns
    write_bytes(path, save(arrays))


def read_trained_on(path: Path) -> TrainedOn:
    """Raises IntegrityError for a file that holds anything but sorted keys."""
    try:
        arrays = load_file(path)
        keys = TrainedOn(arrays.pop(SERVED_PROMPTS), arrays.pop(USER_TURNS, None))
    except (SafetensorError, OSError, KeyError) as error:
        raise IntegrityError(Problem(f"{path} cannot be read", str(error))) from error
    for name, array in ((SERVED_PROMPTS, keys.served_prompts), (USER_TURNS, keys.user_turns)):
        if array is not None and not (
            array.dtype == np.uint64 and array.ndim == 1 and bool((array[1:] > array[:-1]).all())
        ):
            raise IntegrityError(Problem(f"{path}: {name} are not sorted keys"))
    if arrays:
        raise IntegrityError(Problem(f"{path} holds more than keys", sorted(arrays)))
    return keys


def _served_prompt(row: PlannedRow) -> Sequence[int]:
    return row.input_ids[: next(i for i, supervised in enumerate(row.loss_mask) if supervised)]


def _key(hex_sha256: str) -> int:
    return int(hex_sha256[: 2 * _KEY_BYTES], 16)


def _sorted(keys: Iterable[int]) -> NDArray[np.uint64]:
    return np.unique(np.array(list(keys), dtype=np.uint64))


def _holds(keys: NDArray[np.uint64], key: int) -> bool:
    at = int(np.searchsorted(keys, np.uint64(key)))
    return at < len(keys) and int(keys[at]) == key
