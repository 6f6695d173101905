"""Noise on the aux hidden states while training, so that the draft bears its own errors when serving."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.data.shift import Batch

EAGLE_LENGTH = 512  # rows of this many tokens get the noise that the scale names


class TransformTensors:
    """Base of the noise transforms: a new batch in which only the named tensors are changed.

    `scale` is the half-width (uniform) or sigma (gaussian); `std` is its name in speculators 0.3 to 0.8
    and means the same. `tensors` are the aux states by default; the verifier's last state is the training
    target and stays untouched. `layer_rms`: one number for each of the layers that lie side by side in a
    tensor; `scale` then is a share of it. Raises ValueError for a negative or non-finite scale or RMS.
    """

    def __init__(
        self,
        scale: float | None = None,
        tensors: Sequence[str] = ("hidden_states",),
        *,
        std: float | None = None,
        layer_rms: Sequence[float] | None = None,
    ) -> None:
        if scale is not None and std is not None:
            raise ValueError("scale and std are two names of one number: give one of them")
        given = [value for value in (scale, std) if value is not None]
        self.scale = float(given[0]) if given else 0.05
        if not math.isfinite(self.scale) or self.scale < 0:
            raise ValueError(f"noise scale {self.scale} must be finite and >= 0")
        self.layer_rms = None if layer_rms is None else tuple(layer_rms)
        if self.layer_rms is not None and not all(math.isfinite(r) and r >= 0 for r in self.layer_rms):
            raise ValueError(f"the RMS of layers {self.layer_rms} must be finite and >= 0")
        self.tensors = tuple(tensors)

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        """Noise is drawn from `generator`, on its device; None means torch's default generator."""
        changed = {name: self.transform(batch[name], generator) for name in self.tensors}
        return {**batch, **changed}

    def transform(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        raise NotImplementedError

    def _scaled(self, noise: Tensor) -> Tensor:
        """Noise `[..., n_layers * hidden]` times each layer's RMS, in place; as it is where there is none."""
        if self.layer_rms is None:
            return noise
        width, left = divmod(noise.shape[-1], len(self.layer_rms))
        if left:
            raise ValueError(f"{len(self.layer_rms)} layers do not make a width of {noise.shape[-1]}")
        # filled where they are needed: nothing is copied to a device in a training step
        factors = [torch.full((width,), rms, device=noise.device) for rms in self.layer_rms]
        return noise.mul_(torch.cat(factors))


class AddUniformNoise(TransformTensors):
    """Adds U(-scale, +scale) to every value, whatever the length of the row."""

    def transform(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.rand(tensor.shape, generator=generator, device=_draw_device(tensor, generator))
        noise = self._scaled(noise.mul_(2 * self.scale).sub_(self.scale))
        return tensor + noise.to(tensor)


class AddGaussianNoise(TransformTensors):
    """Adds N(0, scale**2) to every value."""

    def transform(self, tensor: Tensor, generator: torch.Generator | None = None) -> Tensor:
        noise = torch.randn(tensor.shape, generator=generator, device=_draw_device(tensor, generator))
        return tensor + self._scaled(noise.mul_(self.scale)).to(tensor)


class AddLengthScaledNoise(TransformTensors):
    """Adds (rand - 0.5) * scale * 512 / T to every value of a row of T tokens: less noise in longer rows.

    The first EAGLE trainer's "uniform" noise, there with std = 0.2 (SafeAILab/EAGLE, eagle/train/main.py,
    AddUniformNoise). T counts the tokens before the shift, as there: in a pack, which has `document_ids`, a row's
    `lengths` is T - 1.
    """

    def __call__(self, batch: Batch, generator: torch.Generator | None = None) -> Batch:
        changed = {}
        for name in self.tensors:
            tensor = batch[name]  # shape: [1, total_seq_len, width] in a pack, [T, width] in a row
            noise = torch.rand(tensor.shape, generator=generator, device=_draw_device(tensor, generator))
            noise = noise.sub_(0.5).mul_(self.scale).to(tensor.device)
            noise = noise.mul_(EAGLE_LENGTH).div_(self._lengths(batch, tensor))
            changed[name] = tensor + noise.to(tensor)
        return {**batch, **changed}

    @staticmethod
    def _lengths(batch: Batch, tensor: Tensor) -> Tensor | int:
        if "document_ids" not in batch:
            return tensor.shape[-2]
        lengths = batch["lengths"].to(tensor.device) + 1
        return lengths[batch["document_ids"].clamp(min=0)].unsqueeze(-1)  # padding: any length will do


def build_noise(cfg: NoiseConfig, layer_rms: Sequence[float] | None = None) -> TransformTensors | None:
    """The transform a configuration asks for; None where it would change nothing.

    layer_rms: of the draft's aux layers, in their order; needed where the noise is relative to it.
    """
    if cfg.kind is NoiseKind.none or cfg.scale == 0:
        return None
    if not math.isfinite(cfg.scale) or cfg.scale < 0:
        raise UserError(
            Problem("noise.scale", cfg.scale, "a finite number >= 0", f"noise={cfg.kind.value}0.05")
        )
    if cfg.kind is NoiseKind.eagle:
        return AddLengthScaledNoise(cfg.scale)
    kinds = {NoiseKind.uniform: AddUniformNoise, NoiseKind.gaussian: AddGaussianNoise}
    if cfg.relative and layer_rms is None:
        raise ValueError("relative noise needs the RMS of the layers it is relative to")
    return kinds[cfg.kind](cfg.scale, layer_rms=layer_rms if cfg.relative else None)


def _draw_device(tensor: Tensor, generator: torch.Generator | None) -> torch.device:
    return generator.device if generator is not None else tensor.device
