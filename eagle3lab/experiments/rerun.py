"""A run repeated from its own files: the configuration to start it with, and what came out differently."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.config.names import METRICS
from eagle3lab.config.options import group_options
from eagle3lab.store.files import sha256_of, write_text
from eagle3lab.store.manifest import is_complete, manifest_hash, read_manifest

from .run_config import flatten, is_place, read_content
from .run_dir import CONFIG, PROVENANCE, SUMMARY, read_json

PRIMARY = "rerun"  # a primary configuration of Hydra's, in the new run directory
WEIGHTS = Path("draft") / "model.safetensors"
_TIMED = ("speed/",)  # columns of metrics.csv that no repetition has again
_PATHS = (
    "store",
    "data.paths",
    "model.path",
    "model.tokenizer",
    "model.template",
    "train.acceptance.prompts",
)


def require_repeatable(run_dir: Path, store: Path | None = None) -> Path:
    """The store that a repetition of the run reads; `store`: where it is now.

    Raises:
        UserError: no finished run, a run of several nodes, or its store is missing or is another one.
    """
    missing = [name for name in (CONFIG, PROVENANCE, SUMMARY, str(WEIGHTS)) if not (run_dir / name).is_file()]
    if missing:
        what = "no finished training run to repeat: it lacks " + ", ".join(missing)
        raise UserError(Problem(what, str(run_dir), "a run directory of train.py"))
    config, recorded = read_content(run_dir), read_json(run_dir / PROVENANCE)["store"]
    problems = []
    if (nodes := config["hardware"]["num_nodes"]) > 1:
        problems.append(
            Problem("the run used several nodes", nodes, "one", f"its own command, in {PROVENANCE}")
        )
    path = store or Path(str(config["store"]))
    if not is_complete(path):
        problems.append(
            Problem(
                "the store of the run is missing or unfinished",
                str(path),
                fix="--store DIRECTORY, where it is now",
            )
        )
    elif (found := manifest_hash(read_manifest(path))) != recorded["manifest_hash"]:
        problems.append(
            Problem(
                f"the store at {path} is another one than the run was trained on",
                f"manifest {found[:12]}",
                f"manifest {recorded['manifest_hash'][:12]}",
                "--store DIRECTORY of that one",
            )
        )
    raise_all(problems)
    return path


def write_primary(run_dir: Path, new_run_dir: Path, store: Path) -> list[str]:
    """Write the run's resolved configuration as `new_run_dir/rerun.yaml`; returns the words that start it.

    Its groups are named too, so that the new run knows them; every value is that of the stored file.
    """
    content, provenance = read_content(run_dir), read_json(run_dir / PROVENANCE)
    content |= {"run_dir": str(new_run_dir.resolve()), "store": str(store.resolve())}
    content |= {"resume": False, "plan": False}
    groups = {g: o for g, o in provenance["choices"].items() if o and "/" not in g and o in group_options(g)}
    primary = {
        "defaults": [
            "train_schema",
            *({group: option} for group, option in groups.items()),
            "_self_",
            {"override hydra/job_logging": "none"},
        ],
        "hydra": {
            "run": {"dir": "."},
            "output_subdir": None,
            "job": {"name": "train", "chdir": False},
        },
        **content,
    }
    new_run_dir.mkdir(parents=True, exist_ok=True)
    text = "# what `python -m eagle3lab rerun` started this run with\n" + OmegaConf.to_yaml(_escaped(primary))
    write_text(new_run_dir / f"{PRIMARY}.yaml", text)
    words = [
        w
        for w in provenance["overrides"]
        if not _is_path(w) and _key(w).partition(".")[0] not in _gone(groups, w)
    ]
    again = [f"++{word.lstrip('+')}" if word.startswith("+") else word for word in words if word[0] != "~"]
    return ["-cd", str(new_run_dir.resolve()), "-cn", PRIMARY, *again]


def differing_configuration(run_dir: Path, new_run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """Nested key -> its value before and now; a store may have been moved, other places are not compared."""
    return _differing(*(_what(flatten(read_content(d))) for d in (run_dir, new_run_dir)))


def differing_environment(run_dir: Path, new_run_dir: Path) -> dict[str, tuple[Any, Any]]:
    """What provenance says differently of code, versions and hardware; None: not recorded."""
    keys = ("eagle3lab", "git", "hardware", "platform", "python", "versions")
    old, new = (read_json(d / PROVENANCE) for d in (run_dir, new_run_dir))
    return _differing(*(flatten({key: p[key] for key in keys if key in p}) for p in (old, new)))


def differing_metrics(run_dir: Path, new_run_dir: Path) -> tuple[int, dict[str, float]]:
    """Rows of metrics.csv, and by column the largest difference where one cell is not the same text.

    Timings are left out. A cell that only one run has, or another number of rows, differs infinitely.
    """
    old, new = (_rows(d / METRICS) for d in (run_dir, new_run_dir))
    found: dict[str, float] = {} if len(old) == len(new) else {"number of rows": math.inf}
    for before, now in zip(old, new, strict=False):
        for column in dict.fromkeys([*before, *now]):
            a, b = before.get(column, ""), now.get(column, "")
            if a != b and not column.startswith(_TIMED):
                difference = abs(float(a) - float(b)) if a and b else math.inf
                found[column] = max(found.get(column, 0.0), difference)
    return len(old), found


def weights_sha256(run_dir: Path) -> str:
    """Of the exported draft."""
    return sha256_of(run_dir / WEIGHTS)


def _escaped(value: Any) -> Any:
    """Text that looks like an interpolation stays text."""
    if isinstance(value, dict):
        return {key: _escaped(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_escaped(v) for v in value]
    return value.replace("${", "\\${") if isinstance(value, str) else value


def _key(override: str) -> str:
    return override.lstrip("+").partition("=")[0]


def _is_path(override: str) -> bool:
    """Whether an override names a place: relative to the directory of the first command, absolute in the file."""
    return _key(override) in _PATHS or is_place(_key(override))


def _gone(groups: Mapping[str, str], override: str) -> set[str]:
    """The group of an override like `noise=OPTION` whose option is no longer there."""
    key = _key(override)
    return {key} if "." not in key and key not in groups else set()


def _what(flat: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in flat.items() if not is_place(key) and key != "store"}


def _differing(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = dict.fromkeys([*old, *new])
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [dict(row) for row in csv.DictReader(file)]
