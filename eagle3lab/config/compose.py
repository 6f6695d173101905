"""From Hydra's configuration to the typed one, and from Hydra's errors to one clear message.

Source of the rules: Hydra 1.3 composes the groups, OmegaConf checks types. What both let through
(`+key`) or say badly (a bare traceback) is handled here.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from .errors import Problem, UserError, raise_all
from .omegaconf_errors import problem_of_value
from .options import config_directory, group_options, missing_option
from .schema import EvaluateRoot, ExtractRoot, TrainRoot
from .stamp import run_stamp

Check = Callable[[Any], list[Problem]]
# what Hydra calls before a sweep, and what that calls to have the trials' stores ready: named, not imported
_SWEEP_START = {
    "_target_": "eagle3lab.experiments.sweep_start.SweepStart",
    "prepare": "eagle3lab.extract.on_demand:prepare_stores",
}
ROOTS: dict[str, type] = {"train": TrainRoot, "extract": ExtractRoot, "evaluate": EvaluateRoot}


def register() -> None:
    """Make the typed roots and the resolver known to Hydra; safe to call twice."""
    store = ConfigStore.instance()
    for name, root in ROOTS.items():
        node = OmegaConf.structured(root)
        _open_dictionaries(node, root)
        store.store(name=f"{name}_schema", node=node)
    store.store(group="hydra/callbacks", name="eagle3lab", node={"sweep_start": _SWEEP_START})
    OmegaConf.register_new_resolver("run_stamp", run_stamp, replace=True)
    # of launchers: training is one process a device, the engines of extraction start their own
    OmegaConf.register_new_resolver(
        "ranks_of", lambda entry, number: number if entry == "train" else 1, replace=True
    )


def _open_dictionaries(node: DictConfig, schema: type) -> None:
    """Let `data.role_map`, `model.template_args` and the like take keys that no schema knows."""
    for f in dataclasses.fields(schema):
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(value):
            _open_dictionaries(node[f.name], type(value))
        elif isinstance(value, dict):
            OmegaConf.set_struct(node[f.name], False)


def to_typed(cfg: DictConfig, root: type) -> tuple[Any, list[Problem]]:
    """The configuration as dataclasses, and its problems.

    Problems are keys the schema does not have (also those added with `+`), mandatory values that are
    missing and values of a wrong type. With missing or wrong values the first result is None.
    """
    names = [f.name for f in dataclasses.fields(root)]
    problems = [unknown_key(str(key), root) for key in cfg if key not in (*names, "hydra")]
    plain = OmegaConf.masked_copy(cfg, names)
    try:
        missing = sorted(OmegaConf.missing_keys(plain))
    except OmegaConfBaseException as error:  # an interpolation that leads nowhere
        return None, [*problems, problem_of_value(str(error))]
    if missing:
        shown = ["draft" if key == "draft_dir" else key for key in missing]
        return None, problems + [Problem(f"{key} must be given", fix=f"{key}=...") for key in shown]
    values = {}
    for name in names:
        try:
            value = plain[name]
            values[name] = OmegaConf.to_object(value) if OmegaConf.is_config(value) else value
        except OmegaConfBaseException as error:
            problems.append(problem_of_value(str(error)))
            continue
        problems += [unknown_key(key, root) for key in _unknown_keys(values[name], f"{name}.")]
    return (root(**values) if len(values) == len(names) else None), problems


def _unknown_keys(node: Any, prefix: str) -> Iterator[str]:
    if not dataclasses.is_dataclass(node):
        return
    known = {f.name for f in dataclasses.fields(node)}
    for name, value in vars(node).items():
        if name not in known:
            yield prefix + name
        else:
            yield from _unknown_keys(value, f"{prefix}{name}.")


# what people type when they come from other trainers
_SYNONYMS = {
    "learning_rate": "optim.lr",
    "batch_size": "train.tokens_per_update",
    "accumulate_grad_batches": "train.tokens_per_update",
    "epochs": "train.max_epochs",
    "max_steps": "train.max_updates",
    "steps": "train.max_updates",
    "warmup_steps": "optim.lr_warmup_updates",
    "max_seq_len": "train.seq_len",
    "std": "noise.scale",
    "devices": "hardware.num_devices",
    "num_speculative_tokens": "decode.k",
}


def unknown_key(key: str, root: type) -> Problem:
    """The problem of a key that the schema does not have, with the nearest one it has."""
    known = list(dict.fromkeys([*_groups(root), *all_keys(root)]))
    parent, _, leaf = key.rpartition(".")
    deepest_first = sorted(known, key=lambda k: -k.count("."))
    leaves = {k.rpartition(".")[2]: k for k in deepest_first} | {
        s: k for s, k in _SYNONYMS.items() if k in known
    }
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.8)
    if not near:
        near = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.75)]
    siblings = [k.rpartition(".")[2] for k in known if k.rpartition(".")[0] == parent]
    expected = f"one of {', '.join(siblings or _groups(root))}"
    return Problem(f"unknown key {key}", expected=expected, fix=f"{near[0]}=..." if near else "")


def all_keys(root: type, prefix: str = "", of: str = "") -> Iterator[str]:
    """Every dotted key of a schema, leaves only; those whose type begins with `of`."""
    for f in dataclasses.fields(root):
        value = f.default_factory() if f.default_factory is not dataclasses.MISSING else None
        if dataclasses.is_dataclass(value):
            yield from all_keys(type(value), f"{prefix}{f.name}.", of)
        elif str(f.type).startswith(of):
            yield prefix + f.name


def _groups(root: type) -> list[str]:
    return [f.name for f in dataclasses.fields(root)]


def is_composition_error(error: Exception) -> bool:
    """True for what Hydra and OmegaConf raise about a command line, a float as group option included."""
    return isinstance(error, HydraException | OmegaConfBaseException) or (
        isinstance(error, ValueError) and str(error).startswith("Config group override must be")
    )


def explain(error: Exception, entry: str, overrides: Sequence[str], check: Check) -> UserError:
    """All problems that the command line has with the configuration, as one `UserError`.

    Hydra stops at the first; each override is therefore composed alone and every failure kept. The
    overrides that compose are then checked together, so that their values are reported too.
    """
    root = ROOTS[entry]
    problems: list[Problem] = []
    good = []
    for override in overrides:
        if override.startswith(("hydra.", "hydra/", "~", "-")) or _is_sweep(override):
            continue
        _, alone = try_compose(entry, [override])
        if alone is None:
            good.append(override)
            continue
        if isinstance(alone, MissingConfigException) and not isinstance(error, MissingConfigException):
            continue  # an option of -cd's directory: the command found it, and failed at something else
        problem = _problem_of(alone, root, override)
        if problem not in problems:
            problems.append(problem)
    cfg, again = try_compose(entry, good)
    if cfg is not None and again is None and problems:
        typed, more = to_typed(cfg, root)
        problems += more + (check(typed) if typed is not None else [])
    return UserError(*(problems or [_problem_of(error, root, "")]))


def compose_alone(entry: str, overrides: Sequence[str], check: Check) -> Any:
    """The typed and checked configuration of `entry`, for a command that Hydra does not run.

    Raises UserError with every problem of the overrides.
    """
    register()
    cfg, error = try_compose(entry, overrides)
    if cfg is None:
        assert error is not None
        raise explain(error, entry, overrides, check)
    typed, problems = to_typed(cfg, ROOTS[entry])
    raise_all([*problems, *(check(typed) if typed is not None else [])])
    return typed


def _is_sweep(override: str) -> bool:
    value = override.partition("=")[2]
    return bool(re.search(r"^[^\[{'\"]*,", value)) or value.startswith(("choice(", "range(", "glob("))


def try_compose(entry: str, overrides: Sequence[str]) -> tuple[DictConfig | None, Exception | None]:
    """The composed configuration, or the error that composing it raises."""
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(config_directory()), version_base="1.3"):
            return compose(entry, overrides=list(overrides)), None
    except Exception as error:
        if not is_composition_error(error):
            raise
        return None, error
    finally:
        GlobalHydra.instance().clear()


def _problem_of(error: Exception, root: type, override: str) -> Problem:
    if isinstance(error, OverrideParseException):
        override = override or error.override
    key, _, value = override.lstrip("+").partition("=")
    if isinstance(error, MissingConfigException):
        return missing_option(error, key, value)
    if isinstance(error, OverrideParseException):
        if "=" not in override:
            fix = f"{key}=..." if key in all_keys(root) or key in _groups(root) else ""
            return Problem("a word without a value", override, "KEY=VALUE or GROUP=OPTION", fix)
        return Problem(
            "the override cannot be parsed",
            override,
            "KEY=VALUE; a value with = , # ( ) or blanks needs quotes inside the shell's own",
            f"'{key}=\"{value}\"'" if key else "",
        )
    messages = [str(error)]
    cause = error.__cause__
    while cause is not None:
        messages.append(str(cause))
        cause = cause.__cause__
    text = "\n".join(messages)
    if "No match in the defaults list" in text or "Could not override" in text or "not in" in text:
        full_key = re.search(r"full_key: (\S+)", text)
        named = full_key.group(1) if full_key else key or "?"
        return unknown_key(key if key.startswith(f"{named}.") else named, root)
    if several := re.match(r"Ambiguous value for argument '(.+)'", text):
        key, _, value = several[1].partition("=")
        in_a_list = f", or {key}=[{value}]" if key in all_keys(root, of="list[") else ""
        return Problem("several values are a sweep", several[1], fix=f"-m {several[1]}{in_a_list}")
    if "Multiple values for" in text:
        return Problem(f"{key} is chosen already", override, "one option per group", f"{key}={value}")
    if text.startswith("Config group override must be"):
        return missing_option(MissingConfigException("", f"{key}/{value}", group_options(key)), key, value)
    return problem_of_value(text, value)
