"""Which validation of a run is the best, when a run ends early, and acceptance measured by decoding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .bounds import positive, within
from .errors import Problem


class SelectBy(Enum):
    """What makes a validation the best: the lowest loss, or the highest acceptance length."""

    loss = "loss"
    simulated_acceptance = "simulated_acceptance"  # peaks while the loss still falls
    real_acceptance = "real_acceptance"  # of the validations that decode, see AcceptanceConfig


SIMULATED, REAL = "val/simulated_acceptance_length", "val/real_acceptance_length"
STEP = "val/acceptance_step"  # and k: simulated, that steps 0..k are all right
# as a validation logs it, and in words
FIGURES = {
    SelectBy.loss: "val/loss",
    SelectBy.simulated_acceptance: SIMULATED,
    SelectBy.real_acceptance: REAL,
}
NAMES = {
    SelectBy.loss: "validation loss",
    SelectBy.simulated_acceptance: "simulated acceptance length",
    SelectBy.real_acceptance: "real acceptance length",
}


@dataclass
class EarlyStoppingConfig:
    """End the run when what `train.select_by` names has not become better for a while."""

    patience: int | None = None  # validations in a row; null: never
    min_delta: float = 0.0  # how much better counts


@dataclass
class AcceptanceConfig:
    """Decode prompts with verifier and draft while training, on the first device; the others wait."""

    every_updates: int | None = None  # with a validation at each; null: never
    num_prompts: int = 8
    k: int | None = None  # drafted tokens per verification step; default: draft.ttt_steps
    max_new_tokens: int = 64
    prompts: str | None = None  # a file as for prompts=jsonl; default: served prompts of validation rows


def check_selection(
    select_by: SelectBy, stopping: EarlyStoppingConfig, acceptance: AcceptanceConfig
) -> Iterator[Problem]:
    """Problems of `train.select_by`, `train.early_stopping` and `train.acceptance`."""
    yield from positive("train.early_stopping.patience", stopping.patience)
    yield from positive("train.early_stopping.min_delta", stopping.min_delta, least=0)
    yield from positive("train.acceptance.every_updates", acceptance.every_updates)
    yield from positive("train.acceptance.num_prompts", acceptance.num_prompts)
    yield from within("train.acceptance.k", acceptance.k, 1, 16)
    yield from positive("train.acceptance.max_new_tokens", acceptance.max_new_tokens, least=2)
    if select_by is SelectBy.real_acceptance and acceptance.every_updates is None:
        yield Problem(
            "train.select_by is real_acceptance, which is never measured",
            "train.acceptance.every_updates=null",
            "a number of updates",
            "train.acceptance.every_updates=200",
        )
