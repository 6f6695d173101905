"""The exponential moving average of the trained weights, which is validated and exported instead of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from eagle3lab.config.errors import IntegrityError, Problem

from .sharding import own_part, placed_like, whole

if TYPE_CHECKING:
    from eagle3lab.config.schema import OptimConfig


def weights_label(optim: OptimConfig) -> str:
    """Which weights a run validates and exports."""
    return "raw" if optim.ema_decay is None else f"averaged (ema_decay {optim.ema_decay:g})"


class WeightAverage:
    """An average of fp32 weights, kept beside them on their device and in their shards.

    After every update: average = d * average + (1 - d) * weights, from the initial weights on, where d is
    min(decay, (1 + updates) / (10 + updates)): the initial weights are soon forgotten in a short run too.
    Nothing but the averages themselves has to be saved.

    Args:
        parameters: names and trained weights.
        held: averages of a checkpoint, whole. Raises `IntegrityError` when they are not of these weights.
    """

    def __init__(
        self,
        parameters: Iterable[tuple[str, nn.Parameter]],
        decay: float,
        held: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.decay = decay
        self.in_use = False  # whether the weights are the averages, and the averages the weights
        self._weights = {name: p.detach() for name, p in parameters}
        if held is None:
            self._averages = {name: weight.clone() for name, weight in self._weights.items()}
            return
        if {n: t.shape for n, t in held.items()} != {n: t.shape for n, t in self._weights.items()}:
            raise IntegrityError(
                Problem("the averaged weights of the checkpoint are not those of this draft")
            )
        self._averages = {name: placed_like(held[name], weight) for name, weight in self._weights.items()}

    @torch.no_grad()
    def update(self, num_updates: int) -> None:
        """Take in the weights after `num_updates` completed updates."""
        assert not self.in_use
        decay = min(self.decay, (1 + num_updates) / (10 + num_updates))
        averages, weights = self._own_parts()
        get_ema_multi_avg_fn(decay)(averages, weights, None)

    @torch.no_grad()
    def exchange(self) -> None:
        """Swap weights and averages, in place: what holds the weights' memory stays right."""
        averages, weights = self._own_parts()
        for average, weight in zip(averages, weights, strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
        self.in_use = not self.in_use

    def _own_parts(self) -> tuple[list[Tensor], list[Tensor]]:
        return (
            [own_part(average) for average in self._averages.values()],
            [own_part(weight) for weight in self._weights.values()],
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Whole averages by name. Every rank must ask when they are in shards."""
        assert not self.in_use
        return {name: whole(average) for name, average in self._averages.items()}
