"""Noise on the aux hidden states while training, so that the draft bears its own errors when serving."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import NoiseConfig, NoiseKind
from eagle3lab.data.shift import Batch


class TransformTensors:
    """Base of the noise transforms: a new batch in which only the named tensors are changed.

    `scale` is the half-width (uniform) or sigma (gaussian); `std` is its name in speculators 0.3 to 0.8
    and means the same. `tensors` are the aux states by default; the verifier's last state is the training
    target and stays untouched. Raises ValueError for a negative or non-finite scale.
    """

    def __init__(
        self,
        scale: float | None = None,
        tensors: Sequence[str] = ("hidden_states",),
        *,
        std: float | None = None,
    ) -> None:
        if scale is not None and std is not None:
            raise ValueError("scale and std are two names of one number: give one of them")
        given = [value for value in (scale, std) if value is not None]
        self.scale = float(given[0]) if given else 0.05
        if not math.isfinite(self.scale) or self.scale < 0:
            raise ValueError(f"noise scale {self.scale} must be finite and >= 0")
        self.tensors = tuple(tensors)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        """Noise is drawn from `generator`, on its device; None means torch's default generator."""
        changed = {name: self.transform(batch[name], generator) for name in self.tensors}
        return {**batch, **changed}

    def transform(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError


class AddUniformNoise(TransformTensors):
    """Adds U(-scale, +scale) to every value, whatever the length of the row."""

    def transform(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.rand(tensor.shape, generator=generator, device=_draw_device(tensor, generator))
        noise = noise.mul_(2 * self.scale).sub_(self.scale)
        return tensor + noise.to(tensor)


class AddGaussianNoise(TransformTensors):
    """Adds N(0, scale**2) to every value."""

    def transform(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, device=_draw_device(tensor, generator))
        return tensor + noise.mul_(self.scale).to(tensor)


def build_noise(cfg: NoiseConfig) -> TransformTensors | None:
    """The transform a configuration asks for; None where it would change nothing."""
    if cfg.kind is NoiseKind.none or cfg.scale == 0:
        return None
    if not math.isfinite(cfg.scale) or cfg.scale < 0:
        raise UserError(
            Problem("noise.scale", cfg.scale, "a finite number >= 0", f"noise={cfg.kind.value}0.05")
        )
    kinds = {NoiseKind.uniform: AddUniformNoise, NoiseKind.gaussian: AddGaussianNoise}
    return kinds[cfg.kind](cfg.scale)


def _draw_device(tensor: Tensor, generator: torch.Generator | None) -> torch.device:
    return generator.device if generator is not None else tensor.device
