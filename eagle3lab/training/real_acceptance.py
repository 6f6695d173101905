"""Acceptance by real decoding at a validation: on the first rank, while the others wait."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .metrics import real_figures
from .sharding import whole

# Trained weights by their names in the draft -> verification steps, and how many of them accepted the drafted
# token at every position. `evaluate.meter.DraftMeter.measure` is one.
Measure = Callable[[Mapping[str, Tensor]], tuple[int, Sequence[int]]]
PATIENCE = timedelta(days=7)  # decoding may take longer than a collective of the training step ever may
FAILED = -1


class RealAcceptance:
    """Measures the weights that a validation sees, which are the averaged ones where a run has them.

    The weights are handed over; the draft in training, its optimizer and the random number generators stay as
    they are.

    Args:
        num_drafted: tokens per verification step.
        measure: on the first rank; None on the others.
    """

    def __init__(self, num_drafted: int, measure: Measure | None) -> None:
        self.num_drafted = num_drafted
        self._measure = measure
        self._group: Any = None

    def figures(self, draft: nn.Module) -> dict[str, float]:
        """`metrics.real_figures` of the draft's weights, the same on every rank; every rank must ask.

        What the first rank raises is raised there, and a RuntimeError on the others.
        """
        weights = {name: whole(p.detach()) for name, p in draft.named_parameters() if p.requires_grad}
        counts = torch.full((1 + self.num_drafted,), FAILED, dtype=torch.int64)
        failure: Exception | None = None
        if _distributed() and self._group is None:
            # over gloo, whose waiting costs no device and has no watchdog
            self._group = dist.new_group(backend="gloo", timeout=PATIENCE)
        if not _distributed() or dist.get_rank() == 0:
            assert self._measure is not None
            try:
                num_steps, accepted_at = self._measure(weights)
                assert len(accepted_at) == self.num_drafted
                counts = torch.tensor([num_steps, *accepted_at], dtype=torch.int64)
            except Exception as error:
                failure = error  # said to the others first: they wait
        if _distributed():
            dist.broadcast(counts, src=0, group=self._group)
        if failure is not None:
            raise failure
        num_steps, *accepted = counts.tolist()
        if num_steps == FAILED:
            raise RuntimeError("the first rank failed to measure acceptance")
        return real_figures(num_steps, accepted)


def _distributed() -> bool:
    return dist.is_available() and dist.is_initialized()
