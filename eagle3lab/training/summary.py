"""What a finished run reports: the content of `summary.json`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class TrainingSummary:
    """Figures of one call of `fit`. Tokens are real ones (no padding) over all ranks."""

    updates: int  # completed, earlier parts of a resumed run included
    epochs: int  # begun
    tokens: int
    resumed_from_update: int
    seconds: float  # this call, set-up, validation and saving included
    train_seconds: float  # this call, training alone
    tokens_per_second: float  # training alone, without the first logging interval where there are more
    data_wait_share: float  # of train_seconds, rank 0
    peak_memory_gib: float  # rank 0
    num_replicas: int
    micro_batches_per_update: int
    last: dict[str, float]  # the last logging interval
    last_validation: dict[str, float]
    best_validation: dict[str, float]
    last_checkpoint: str
    best_checkpoint: str | None  # None without validation rows

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
