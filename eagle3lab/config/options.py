"""The options of the groups in `conf/`, and what is said of one that is not there."""

from __future__ import annotations

import difflib
from pathlib import Path

from hydra.errors import MissingConfigException

from .errors import Problem, UserError

# launchers and sweepers of other packages -> the extra of this one that installs them
_EXTRAS = {
    "joblib": "joblib",
    "submitit_slurm": "submitit",
    "submitit_local": "submitit",
    "ray": "ray",
    "optuna": "optuna",
}
# what stands for files of the user's own in a group that was given a path
_PLACES = {
    "model": "model=local model.name=NAME model.path={}",
    "data": "data=jsonl data.paths=[{}]",
    "prompts": "prompts=jsonl prompts.path={}",
}


def config_directory() -> Path:
    """The `conf/` of a checkout or an editable install, else the one inside the wheel."""
    package = Path(__file__).resolve().parent.parent
    for candidate in (package.parent / "conf", package / "conf"):
        if (candidate / "train.yaml").is_file():
            return candidate
    raise UserError(Problem("the configuration directory conf/ is missing", str(package.parent)))


def group_options(group: str) -> list[str]:
    """The options of a group, by name."""
    return sorted(f.stem for f in (config_directory() / group).glob("*.yaml"))


def options_of(group: str, entry: str) -> list[str]:
    """Those that `entry` can use: most experiments are recipes for `train.py` alone."""
    return group_options("experiment/extract" if (group, entry) == ("experiment", "extract") else group)


def missing_option(error: MissingConfigException, key: str, value: str) -> Problem:
    """The problem of `key=value`, where Hydra found no such option; both may be empty."""
    options = list(error.options or [])
    group = (error.missing_cfg_file or f"{key}/{value}").rpartition("/")[0] or key
    wanted = (error.missing_cfg_file or value).rpartition("/")[2]
    if group in ("hydra/launcher", "hydra/sweeper") and wanted in _EXTRAS:
        return Problem(f"{wanted} is not installed", fix=f"pip install 'eagle3lab[{_EXTRAS[wanted]}]'")
    if not group:
        sweeps = [f.stem for f in (config_directory().parent / "sweeps").glob("*.yaml")]
        meant = difflib.get_close_matches(wanted, sweeps, n=1)
        fix = f"-cd sweeps -cn {meant[0]}" if meant else ""
        return Problem(
            "there is no such configuration", wanted, "a file of conf/ or of the directory of -cd", fix
        )
    if "/" in value:  # a path or a name of a hub, which Hydra takes for a group within the group
        group, wanted = key, value
    near = difflib.get_close_matches(wanted.rpartition("/")[2], options, n=1, cutoff=0.4)
    if group == "experiment/extract":
        group = "experiment"
        if wanted in group_options(group):
            said = f"one of {', '.join(options)}"
            return Problem("the experiment is a recipe for train.py", wanted, said, f"{group}={options[0]}")
    fixes = [f"{group}={near[0]}"] if near else []
    if group in _PLACES and ("/" in wanted or wanted.endswith((".json", ".jsonl"))):
        fixes = [*(fixes if group == "model" else ()), _PLACES[group].format(wanted)]
    return Problem(
        f"the group {group} has no option",
        wanted,
        f"one of {', '.join(options)}" if options else "an existing configuration file",
        ", or ".join(fixes),
    )
