"""Names of runs, made from what was chosen and what was changed, so that no name can lie; and of files in them."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence

from .loss_text import loss_label
from .noise import noise_label
from .schema import TrainRoot

METRICS, CHECKPOINTS = "metrics.csv", "checkpoints"  # in a run directory, written while it trains
MAX_LENGTH = 120
# where or how long a run computes, not what: these never change a result's meaning
_SILENT = (
    "hardware",
    "launcher",
    "logger",
    "store",
    "outputs",
    "run_name",
    "run_dir",
    "resume",
    "plan",
    "hydra",
)


def run_name(cfg: TrainRoot, overrides: Sequence[str]) -> str:
    """`<model>-<data>-<draft>-<noise>` and every other override of the command line, the loss first.

    `noise=uniform0.05 noise.scale=0.3` is `...-uniform0.3`, `loss=kl loss.kind=tv` is `...-tv`. Long names are
    cut and carry a hash of the whole, so two different runs never share a name.
    """
    parts = [cfg.model.name, cfg.data.name, cfg.draft.name, noise_label(cfg.noise)]
    if any(_group(override) == "loss" for override in overrides):
        parts.append(loss_label(cfg.loss))
    for override in sorted(overrides):
        key, _, value = override.lstrip("+").partition("=")
        if _group(override) in (*_SILENT, "noise", "loss") or key in (
            "model",
            "data",
            "draft",
            "model.path",
            "data.paths",
        ):
            continue
        leaf = key.rpartition(".")[2]
        parts.append(f"{leaf}_{value}" if "." in key else f"{value}")
    return safe_name("-".join(parts))


def is_silent(override: str) -> bool:
    """Whether an override changes only where or how fast something runs."""
    return _group(override) in _SILENT


def _group(override: str) -> str:
    return override.lstrip("+").partition("=")[0].partition(".")[0]


def honest_choices(choices: Mapping[str, str], overrides: Sequence[str], cfg: TrainRoot) -> dict[str, str]:
    """The options chosen, so that none claims what was overridden.

    Noise and loss go by their values, others are marked `+changed`. An experiment changes the options of draft and
    optimizer it builds on: they are marked with its name.
    """
    changed = {_group(override) for override in overrides if "." in override.partition("=")[0]}
    named = {group: f"{option}+changed" if group in changed else option for group, option in choices.items()}
    recipe = choices.get("experiment")
    if recipe:
        named |= {group: f"{named[group]}+{recipe}" for group in ("draft", "optim") if group in named}
    labels = {"noise": noise_label(cfg.noise), "loss": loss_label(cfg.loss)}
    return named | {group: label for group, label in labels.items() if group in named}


def safe_name(text: str) -> str:
    """`text` as one path component; distinct texts stay distinct (a hash is added when any were changed)."""
    clean = re.sub(r"[^\w.+-]+", "_", text).strip("._")
    if clean == text and len(clean) <= MAX_LENGTH:
        return clean
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{clean[: MAX_LENGTH - 9]}-{digest}"


def store_name(cfg_model_name: str, cfg_data_name: str, *, regenerated: bool = False) -> str:
    """Default store of a verifier and a data option; one with the verifier's own answers is another."""
    name = f"stores/{safe_name(cfg_model_name)}-{safe_name(cfg_data_name)}"
    return f"{name}-regenerated" if regenerated else name
