"""The words of a command line, sorted and named as Hydra's parser takes them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

# options of Hydra whose value is the next word
_WITH_VALUE = {"-c", "--cfg", "-cd", "--config-dir", "-cn", "--config-name", "-cp", "--config-path"}
_WITH_VALUE |= {"-i", "--info", "-p", "--package", "--experimental-rerun"}
# what the user says -> what Hydra has to be told
_MEANT = {"evaluate": ("draft", "draft_dir"), "extract": ("experiment", "experiment/extract")}


def command_line(entry: str, argv: Sequence[str]) -> list[str]:
    """`argv` for Hydra: overrides behind its own options, and `evaluate.py draft=DIR` as no group's option.

    Its parser calls overrides on both sides of an option unrecognized. The experiments of `extract.py` are a group
    of their own: those of training name groups that it does not have.
    """
    said, hydras = _MEANT.get(entry, ("", ""))
    options, overrides = _sorted(argv)
    if said:
        overrides = [re.sub(rf"^(\+*){said}=", rf"\1{hydras}=", word) for word in overrides]
    return [*options, *overrides]


def overrides_of(argv: Sequence[str]) -> list[str]:
    """The words that are neither options nor their values."""
    return _sorted(argv)[1]


def _sorted(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    options: list[str] = []
    overrides: list[str] = []
    for before, word in pairwise(["", *argv]):
        (options if word.startswith("-") or before in _WITH_VALUE else overrides).append(word)
    return options, overrides
