"""What a run was: its resolved configuration, read back; which runs differ in seeds alone; what else differs.

No torch: comparisons must start at once.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle3lab.config.errors import IntegrityError, Problem

from .run_dir import CONFIG, PROVENANCE, read_json

ABSENT = "(absent)"
STORE, COMMIT = "store", "git.commit"
# where a run is kept and watched, and what ran beside it: not what it is
_PLACES = (
    "outputs", "run_name", "run_dir", "resume", "plan", "logger", "launcher", "hardware.name",
    "hardware.trials_per_node",
)  # fmt: skip


@dataclass(frozen=True)
class RunConfig:
    """One run's configuration as `{"optim.lr": 0.001, ...}`, seeds apart, places left out."""

    values: Mapping[str, Any]
    seeds: Mapping[str, Any]
    identity: Mapping[str, Any]  # the values as they are compared: a store by its content, not by its place


def read_run_config(run_dir: Path) -> RunConfig | None:
    """Read `run_dir`; None where there is no configuration: the draft was trained elsewhere.

    Raises:
        IntegrityError: the configuration is unreadable.
    """
    if not (run_dir / CONFIG).is_file():
        return None
    flat = {key: value for key, value in flatten(read_content(run_dir)).items() if not is_place(key)}
    seeds = {key: value for key, value in flat.items() if is_seed(key)}
    values = {key: value for key, value in flat.items() if key not in seeds}
    identity = dict(values)
    if (run_dir / PROVENANCE).is_file():
        provenance = read_json(run_dir / PROVENANCE)
        git = provenance.get("git") or {}
        if git.get("commit"):
            values[COMMIT] = git["commit"][:12] + (" and changes" if git.get("dirty") else "")
            identity[COMMIT] = values[COMMIT]
        if content_hash := (provenance.get("store") or {}).get("manifest_hash"):
            identity[STORE] = content_hash
    return RunConfig(values, seeds, identity)


def read_content(run_dir: Path) -> dict[str, Any]:
    """The resolved configuration, nested, text that looks like an interpolation as it is.

    Raises IntegrityError when it is unreadable.
    """
    try:
        content = OmegaConf.to_container(OmegaConf.load(run_dir / CONFIG), resolve=False)
    except Exception as error:  # YAML and omegaconf have no common base
        raise IntegrityError(Problem(f"cannot read {run_dir / CONFIG}", str(error))) from error
    if not isinstance(content, dict):
        raise IntegrityError(Problem(f"{run_dir / CONFIG} holds no configuration"))
    return {str(key): value for key, value in content.items()}


def flatten(nested: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` -> `{"a.b": 1}`; an empty mapping stays a value."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, dict) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def is_seed(key: str) -> bool:
    """Whether a nested key only says which random numbers are drawn."""
    name = key.rpartition(".")[2]
    return name == "seed" or name.endswith("_seed")


def group_by_configuration(
    runs: Sequence[RunConfig | None], ignore: Collection[str] = ()
) -> list[tuple[int, ...]]:
    """Indices of the runs that differ in seeds alone, in the order of their first member.

    A run without a configuration stays alone. `ignore`: nested keys, or groups of them, that do not count.
    """
    groups: list[list[int]] = []
    for i, run in enumerate(runs):
        for group in groups:
            first = runs[group[0]]
            if run and first and not differing_keys([first, run], ignore):
                group.append(i)
                break
        else:
            groups.append([i])
    return [tuple(group) for group in groups]


def differing_keys(runs: Sequence[RunConfig | None], ignore: Collection[str] = ()) -> list[str]:
    """Nested keys whose values are not the same in all runs that have a configuration, in their order."""
    known = [run.identity for run in runs if run]
    keys = dict.fromkeys(key for identity in known for key in identity)
    return [
        key
        for key in keys
        if not _within(key, ignore)
        and any(other.get(key, ABSENT) != known[0].get(key, ABSENT) for other in known[1:])
    ]


def repeated_seeds(runs: Sequence[RunConfig | None]) -> tuple[int, int] | None:
    """Two runs of one configuration that also have the same seeds: not two independent runs."""
    for j, run in enumerate(runs):
        for i in range(j):
            earlier = runs[i]
            if run and earlier and dict(run.seeds) == dict(earlier.seeds):
                return i, j
    return None


def is_place(key: str) -> bool:
    """Whether a nested key only says where a run is kept and watched."""
    return _within(key, _PLACES)


def _within(key: str, keys: Collection[str]) -> bool:
    return any(key == k or key.startswith(f"{k}.") for k in keys)
