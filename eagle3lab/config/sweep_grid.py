"""The trials of a sweep, known before they are launched, composed as the launcher will compose them."""

from __future__ import annotations

from collections.abc import Sequence

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf


def trials_of(config: DictConfig) -> tuple[list[list[str]], bool]:
    """Overrides of every trial, in the order of their numbers; True when these are all of them.

    A sweeper that proposes trials as it goes gives one example, with its intervals left out.
    """
    params = OmegaConf.select(config, "hydra.sweeper.params") or {}
    words = [f"{key}={value}" for key, value in params.items()] + list(config.hydra.overrides.task)
    loader = GlobalHydra.instance().config_loader()
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(words)
    proposed = config.hydra.runtime.choices.get("hydra/sweeper") != "basic"
    if proposed:
        parsed = [o for o in parsed if not o.is_sweep_override() or o.is_discrete_sweep()]
    trials = BasicSweeper.split_arguments(parsed, None)[0]
    if proposed:
        return trials[:1], False
    return trials, True


def load_trial(config: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """One trial's configuration, `hydra` node included. Raises what Hydra raises."""
    return GlobalHydra.instance().config_loader().load_sweep_config(config, list(overrides))
