"""Which validation is the best so far, and when a run has stopped becoming better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.selection import FIGURES, NAMES, EarlyStoppingConfig, SelectBy


class Selection:
    """Takes the figures of every validation in order. The same on every rank.

    A validation is the best when its figure is better than that of every one before it: of equal ones the
    earlier stays, and what is missing, NaN or infinite is never the best. The run has had its time when
    `patience` validations in a row, of those that have the figure, were not better than the last one that
    counted by more than `min_delta`. The untrained draft is compared with and never chosen.
    """

    def __init__(self, select_by: SelectBy, stopping: EarlyStoppingConfig) -> None:
        self.select_by = select_by
        self.figure = FIGURES[select_by]
        self.patience = stopping.patience
        self.min_delta = stopping.min_delta
        self.best: dict[str, float] = {}  # all figures of the best validation
        self.untrained: float | None = None  # the untrained draft's own figure, where it was measured
        self._to_beat: float | None = None
        self._waited = 0

    def begin(self, figures: Mapping[str, float]) -> None:
        """The figures of the untrained draft."""
        self.untrained = self._value(figures)

    def take(self, figures: Mapping[str, float]) -> bool:
        """Whether this validation is the best so far."""
        value = self._value(figures)
        if value is None:
            return False
        if self._to_beat is None or self._gain(value, self._to_beat) > self.min_delta:
            self._to_beat, self._waited = value, 0
        else:
            self._waited += 1
        best = self._value(self.best)
        is_best = best is None or self._gain(value, best) > 0
        if is_best:
            self.best = dict(figures)
        return is_best

    @property
    def has_stopped(self) -> bool:
        """Whether the run is to end here."""
        return self.patience is not None and self._waited >= self.patience

    @property
    def beats_untrained(self) -> bool | None:
        """Whether the best is better than the untrained draft; None where one of them was not measured."""
        best = self._value(self.best)
        return None if best is None or self.untrained is None else self._gain(best, self.untrained) > 0

    def outcome(self) -> dict[str, Any]:
        """What checkpoints, the export and the summary say of the choice, as plain data."""
        return {
            "select_by": self.select_by.value,
            "figure": self.figure,
            "value": self._value(self.best),
            "update": int(self.best["update"]) if self.best else None,
            "untrained_value": self.untrained,
            "better_than_untrained": self.beats_untrained,
            "validations_without_gain": self._waited,
            "stopped_early": self.has_stopped,
        }

    def state_dict(self) -> dict[str, Any]:
        """Plain data, from which a resumed run goes on as if it had never stopped."""
        return {
            "select_by": self.select_by.value,
            "best": dict(self.best),
            "untrained": self.untrained,
            "to_beat": self._to_beat,
            "waited": self._waited,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises `UserError` when the run has selected by something else until now."""
        # a checkpoint that holds no more than the best figures selected by the default
        before = state.get("select_by", SelectBy.simulated_acceptance.value)
        if before != self.select_by.value:
            raise UserError(
                Problem(
                    "the run has selected by another figure until now",
                    before,
                    f"{self.select_by.value}, as this command has it",
                    f"train.select_by={before}",
                )
            )
        self.best, self.untrained = dict(state["best"]), state.get("untrained")
        self._to_beat, self._waited = state.get("to_beat"), state.get("waited", 0)

    def _value(self, figures: Mapping[str, float]) -> float | None:
        value = figures.get(self.figure)
        return value if value is not None and math.isfinite(value) else None

    def _gain(self, value: float, before: float) -> float:
        return before - value if self.select_by is SelectBy.loss else value - before


def describe_outcome(outcome: Mapping[str, Any]) -> str:
    """`Selection.outcome` in a line or two."""
    name, untrained = NAMES[SelectBy(outcome["select_by"])], outcome["untrained_value"]
    if outcome["value"] is None:
        return f"selected  none: no checkpoint has a finite {name}, so the last weights are exported"
    beside = "" if untrained is None else f", untrained {untrained:.4f}"
    lines = [f"selected  update {outcome['update']:,} by {name} {outcome['value']:.4f}{beside}"]
    if outcome["better_than_untrained"] is False:
        lines.append(f"  NOTE: no validation has a better {name} than the untrained draft")
    if outcome["stopped_early"]:
        waited = outcome["validations_without_gain"]
        lines.append(f"  stopped early: {waited} validations in a row gained too little")
    return "\n".join(lines)
