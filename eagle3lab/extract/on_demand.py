"""The store that `train.py` reads; for the tiny verifier it is made on the spot when it is missing."""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3lab.config.errors import UserError
from eagle3lab.config.invocation import Invocation, default_store, extract_command
from eagle3lab.config.schema import ExtractorConfig, TrainRoot
from eagle3lab.config.stamp import is_rank_zero
from eagle3lab.engines.devices import resolve_hardware
from eagle3lab.store.manifest import is_complete
from eagle3lab.store.reader import StoreReader

from .pipeline import extract_store

ON_DEMAND_SECONDS = 600.0  # what the other ranks wait for rank 0


def open_store(cfg: TrainRoot, invocation: Invocation) -> StoreReader:
    """The run's store; the tiny verifier's default one is made here when it is missing."""
    path = Path(str(cfg.store))
    command = extract_command(invocation.overrides)
    default = path == default_store(cfg.model, cfg.data, invocation)
    seconds_only = cfg.model.extract_on_demand and not cfg.data.regenerate
    if seconds_only and default and not is_complete(path):
        if is_rank_zero():
            print(f"no store yet: extracting the {cfg.model.name} verifier's (seconds)")
            extract_store(
                model=cfg.model, data=cfg.data, extract=ExtractorConfig(), hardware=cfg.hardware, store=path
            )
        else:
            _wait_for(lambda: is_complete(path), ON_DEMAND_SECONDS, f"rank 0 to finish the store {path}")
    suffix = "" if default else " " + shlex.quote(f"store={path}")
    return StoreReader(path, extract_command=f"{command}{suffix}")


def prepare_stores(trials: Sequence[tuple[TrainRoot, Invocation]]) -> None:
    """Have every store that a sweep's trials read ready before the first begins, each opened once.

    Raises UserError where one is missing and is not made on the spot.
    """
    seen = set()
    for cfg, invocation in trials:
        if cfg.store not in seen:
            seen.add(cfg.store)
            if not is_complete(
                Path(str(cfg.store))
            ):  # asking for devices starts CUDA, which none else needs here
                cfg = dataclasses.replace(cfg, hardware=resolve_hardware(cfg.hardware, require=False))
            open_store(cfg, invocation)


def _wait_for(done: Callable[[], bool], seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            raise UserError(f"waited {seconds:g} s for {what}")
        time.sleep(0.2)
