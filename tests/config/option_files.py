"""Composing the files of `conf/` and `sweeps/` in tests, the way the three commands do."""

from __future__ import annotations

import copy
import re
import shlex
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.words import command_line

CONF = compose.config_directory()
SWEEPS = CONF.parent / "sweeps"
CONF_FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))
compose.register()
SWEEP_FILES = sorted(
    path.relative_to(SWEEPS) for path in SWEEPS.rglob("*.yaml") if path.parent.name != "wandb"
)  # those are W&B's, not Hydra's: experiments/test_wandb_sweep.py walks them


def command_of(path: Path) -> list[str]:
    """The words of the command in a file's first lines."""
    lines = path.read_text().splitlines()
    command = next(line for line in lines[:2] if line.startswith("# ") and ".py" in line)
    return shlex.split(command[2:])


def composed(name: str, overrides: Sequence[str], directory: Path = CONF) -> DictConfig:
    """The configuration with Hydra's own part; `directory`: of the primary configuration."""
    path = [f"hydra.searchpath=[file://{CONF}]"] if directory != CONF else []
    with initialize_config_dir(str(directory), version_base="1.3"):
        return hydra_compose(name, overrides=[*path, *overrides], return_hydra_config=True)


def typed(name: str, overrides: Sequence[str], directory: Path = CONF, entry: str | None = None) -> Any:
    """The typed configuration; asserts that nothing but a directory that is elsewhere is wrong with it."""
    words = command_line(entry or name, overrides)
    return checked(composed(name, words, directory), entry or name, words)


def checked(cfg: DictConfig, entry: str, overrides: Sequence[str]) -> Any:
    """`cfg` in typed form; asserts what `typed` asserts."""
    root, problems = compose.to_typed(cfg, compose.ROOTS[entry])
    assert [str(p) for p in problems] == [], overrides
    assert problems_of(root, entry) == [], overrides
    return root


def problems_of(root: Any, entry: str) -> list[str]:
    return [str(p) for p in CHECKS[entry](root) if "is not a directory" not in str(p)]


def own_overrides(path: Path) -> list[str]:
    """What chooses an option of `conf/`: itself, and the values without which its own command would not work."""
    group, option = path.parent.as_posix(), path.stem
    return [f"{group}={option}", *(w for w in command_of(CONF / path) if w.startswith(f"{group}."))]


def jobs_of(path: Path) -> Iterator[list[str]]:
    """The overrides of every job of a sweep; of a range that a sweeper draws from, its two ends."""
    content = yaml.safe_load((SWEEPS / path).read_text())
    if "parameters" in content:  # a sweep of W&B
        axes = [[f"{key}={v}" for v in _values(spec)] for key, spec in content["parameters"].items()]
    else:
        cfg = composed(path.stem, [], SWEEPS / path.parent)
        params = OmegaConf.to_container(cfg.hydra.sweeper.params)
        assert isinstance(params, dict)
        axes = [_choices(f"{key}={value}") for key, value in params.items()]
    for job in product(*axes):
        yield [word for choice in job for word in shlex.split(choice)]


def check_jobs(jobs: Sequence[Sequence[str]], name: str, directory: Path) -> None:
    """Assert that every job of a sweep of `train.py` validates. What chooses options is composed once each."""
    bases: dict[tuple[str, ...], DictConfig] = {}
    for job in jobs:
        options = tuple(word for word in job if "." not in word.partition("=")[0])
        if options not in bases:
            bases[options] = composed(name, ["model=tiny", "hardware=cpu", *options], directory)
        cfg = copy.deepcopy(bases[options])
        for override in OverridesParser.create().parse_overrides([w for w in job if w not in options]):
            OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=False)
        checked(cfg, "train", job)


def _choices(line: str) -> list[str]:
    (override,) = OverridesParser.create().parse_overrides([line])
    if override.is_interval_sweep():
        interval = override.value()
        return [f"{override.get_key_element()}={end:g}" for end in (interval.start, interval.end)]
    if override.is_sweep_override():
        return [f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()]
    return [line]


def _values(spec: dict[str, Any]) -> list[Any]:
    if "values" in spec:
        return list(spec["values"])
    return [spec["value"]] if "value" in spec else [spec["min"], spec["max"]]


def entry_of(words: Sequence[str]) -> str:
    """The command that a line of words runs: train, extract or evaluate."""
    return next(m.group(1) for w in words if (m := re.fullmatch(r"(train|extract|evaluate)\.py", w)))
