"""Options that were chosen and do nothing, because an experiment sets what they set: refused, not ignored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from .errors import Problem
from .value_text import as_typed


def overruled(cfg: DictConfig, words: Sequence[str], conf: Path) -> list[Problem]:
    """A problem for each option among the overrides `words` of which an experiment left nothing, or not its kind.

    Values of an experiment come after those of the groups. It may refine an option; what names the option by its
    `kind`, and an option of which no value is left, it would replace without a word. conf: where the groups are.
    """
    given = dict(word.lstrip("+").partition("=")[::2] for word in words)
    experiment = given.get("experiment") or given.get("experiment/extract")
    if not experiment:
        return []
    values = [key for key in given if "." in key]
    problems = []
    for group, option in given.items():
        file = conf / group / f"{option}.yaml"
        if "." in group or group.startswith("experiment") or not file.is_file():
            continue
        meant = {
            key: value
            for key, value in _leaves(OmegaConf.load(file), f"{group}.")
            if key != f"{group}.name" and not any(f"{key}.".startswith(f"{own}.") for own in values)
        }
        found = {key: _plain(OmegaConf.select(cfg, key)) for key in meant}
        lost = [key for key in meant if found[key] != meant[key]]
        kind = f"{group}.kind"
        if lost and (len(lost) == len(meant) or kind in lost):
            lost = [kind] if kind in lost else lost
            problems.append(
                Problem(
                    f"{group}={option} is overruled by experiment={experiment}, which has",
                    " ".join(f"{key}={as_typed(found[key])}" for key in lost),
                    "values that do what was chosen",
                    " ".join(f"{key}={as_typed(meant[key])}" for key in lost),
                )
            )
    return problems


def _leaves(node: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key in node:
        if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
            continue
        if OmegaConf.is_dict(node[key]):
            yield from _leaves(node[key], f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", _plain(node[key])


def _plain(value: Any) -> Any:
    value = OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
    return value.value if isinstance(value, Enum) else value
