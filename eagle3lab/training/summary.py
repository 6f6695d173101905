"""What a finished run reports: the content of `summary.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

# where the run stood between what the devices could do and what held it back
_ROOFLINE = (
    "tokens_per_second",
    "supervised_tokens_per_second",
    "mfu",
    "needed_tflops_per_device",
    "data_wait_share",
    "read_gb_per_second",
    "peak_memory_gib",
    "limited_by",
    "train_seconds",
)


@dataclass(frozen=True)
class TrainingSummary:
    """Figures of one call of `fit`. Tokens are real ones (no padding) over all ranks."""

    updates: int  # completed, earlier parts of a resumed run included
    epochs: int  # begun
    tokens: int
    resumed_from_update: int
    seconds: float  # from the command on, set-up, validation and saving included
    train_seconds: float  # this call, training alone
    tokens_per_second: float  # training alone, without the first logging interval where there are more
    supervised_tokens_per_second: float  # this and the next four of the same time
    mfu: float | None  # work needed as a share of hardware.peak_tflops, rank 0; None where that is not set
    needed_tflops_per_device: float  # work needed per second, rank 0; 0 where it was not counted
    data_wait_share: float  # rank 0
    read_gb_per_second: float  # of states from the store, rank 0 times the number of ranks
    peak_memory_gib: float  # rank 0
    first_update_seconds: float | None  # from the command to the end of this call's first update
    limited_by: str  # start-up, validation, data, memory, too-small updates or compute
    limit: str  # the same with the figures that say so
    num_replicas: int
    micro_batches_per_update: int
    last: dict[str, float]  # the last logging interval
    last_validation: dict[str, float]
    best_validation: dict[str, float]
    selection: dict[str, Any]  # `Selection.outcome`: by which figure, its value, the untrained draft's
    last_checkpoint: str
    best_checkpoint: str | None  # None without validation rows

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def for_tracker(self) -> dict[str, Any]:
        """What a table of many runs shows: the exported validation's figures, how it was chosen, the roofline."""
        return {
            **(self.best_validation or self.last_validation),
            "selection": self.selection,
            "roofline": {name: getattr(self, name) for name in _ROOFLINE},
        }
