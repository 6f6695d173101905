"""Noise on the aux hidden states while training: its settings, their checks, and what it is called."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from .errors import Problem


class NoiseKind(Enum):
    none = "none"
    uniform = "uniform"  # scale is the half-width
    gaussian = "gaussian"  # scale is sigma
    eagle = "eagle"  # uniform, of half-width scale / 2 * 512 / length of the row: the first EAGLE trainer's


@dataclass
class NoiseConfig:
    """Noise on the aux hidden states while training. What `scale` means depends on `kind`."""

    kind: NoiseKind = NoiseKind.none
    scale: float = 0.0
    relative: bool = False  # scale is a share of each aux layer's own RMS (that of its typical token)


def check_noise(noise: NoiseConfig) -> Iterator[Problem]:
    """Problems of `noise`."""
    kind = noise.kind
    if not (math.isfinite(noise.scale) and noise.scale >= 0):
        yield Problem("noise.scale", noise.scale, "a finite number from 0", "noise.scale=0.05")
    elif kind is NoiseKind.none and noise.scale != 0:
        yield Problem(
            "noise.scale is set but noise.kind is none",
            noise.scale,
            "0",
            f"noise.kind=uniform noise.scale={noise.scale:g}",
        )
    elif kind is not NoiseKind.none and noise.scale == 0:
        yield Problem(f"noise.kind is {kind.value} but noise.scale is 0", fix="noise=none")
    if noise.relative and kind not in (NoiseKind.uniform, NoiseKind.gaussian):
        yield Problem(
            f"noise.relative is set but noise.kind is {kind.value}",
            expected="relative only with uniform or gaussian noise",
            fix="noise.relative=false",
        )


def noise_label(noise: NoiseConfig) -> str:
    """`none`, `uniform0.05`, `gaussian0.1rms`, `eagle0.2`: from the values, not from the option's name."""
    if noise.kind is NoiseKind.none:
        return "none"
    return f"{noise.kind.value}{noise.scale:g}" + ("rms" if noise.relative else "")


def describe_noise(noise: NoiseConfig) -> str:
    """The noise in words, for people."""
    width = f"{noise.scale:g}" + (" of each layer's RMS" if noise.relative else "")
    return {
        NoiseKind.none: "none",
        NoiseKind.uniform: f"uniform in +-{width}",
        NoiseKind.gaussian: f"gaussian, sigma {width}",
        NoiseKind.eagle: f"uniform in +-{noise.scale / 2:g} x 512 / length of the row",
    }[noise.kind]
