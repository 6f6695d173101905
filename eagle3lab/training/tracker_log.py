"""Hands every logged figure on to a tracker (W&B) that knows nothing of Lightning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only


class Tracker(Protocol):
    """What `experiments.tracking.WandbTracker` offers."""

    @property
    def run_id(self) -> str: ...

    def log(self, figures: Mapping[str, float]) -> None: ...


class TrackerLog(Logger):
    """A Lightning logger around a `Tracker`; figures carry their own x-axes."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    @property
    def name(self) -> str:
        return "tracker"

    @property
    def version(self) -> str:
        return self._tracker.run_id

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._tracker.log(metrics)

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing: the tracker got the resolved configuration at its start."""
