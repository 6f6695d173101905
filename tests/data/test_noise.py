"""Noise: its width, its generator, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import NoiseConfig, NoiseKind
from eagle3lab.data import AddGaussianNoise, AddUniformNoise, TransformTensors, build_noise


def batch(length: int = 100, width: int = 1000, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    return {
        "hidden_states": torch.zeros(1, length, width, dtype=dtype),
        "verifier_last_hidden_states": torch.ones(1, length, 8, dtype=dtype),
        "input_ids": torch.arange(length)[None],
        "loss_mask": torch.ones(1, length, dtype=torch.bool),
    }


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("scale", [0.05, 0.1, 2.0])
@pytest.mark.parametrize("length", [128, 512, 2048])
def test_uniform_noise_has_the_named_half_width_at_every_length(scale: float, length: int) -> None:
    noise = AddUniformNoise(scale)(batch(length, 200), generator())["hidden_states"].double()
    assert float(noise.abs().max()) <= scale * (1 + 1e-6)
    assert float(noise.abs().max()) > 0.99 * scale
    assert float(noise.mean()) == pytest.approx(0, abs=0.02 * scale)
    assert float(noise.abs().mean()) == pytest.approx(scale / 2, rel=0.02)
    assert float(noise.std()) == pytest.approx(scale / math.sqrt(3), rel=0.02)


@pytest.mark.parametrize("scale", [0.05, 2.0])
def test_gaussian_noise_has_the_named_sigma(scale: float) -> None:
    noise = AddGaussianNoise(scale)(batch(), generator())["hidden_states"].double()
    assert float(noise.mean()) == pytest.approx(0, abs=0.02 * scale)
    assert float(noise.std()) == pytest.approx(scale, rel=0.02)
    assert float((noise.abs() < scale).double().mean()) == pytest.approx(0.6827, abs=0.01)


@pytest.mark.parametrize("kind", [AddUniformNoise, AddGaussianNoise])
def test_noise_is_drawn_in_fp32_and_cast_once(kind: type[TransformTensors]) -> None:
    """bf16 draws would have only 8 bits: about 256 different values instead of as many as bf16 has."""
    wide = kind(0.05)(batch(), generator())["hidden_states"]
    narrow = kind(0.05)(batch(dtype=torch.bfloat16), generator())["hidden_states"]
    assert narrow.dtype == torch.bfloat16
    assert torch.equal(narrow, wide.bfloat16())


@pytest.mark.parametrize("kind", [AddUniformNoise, AddGaussianNoise])
def test_only_the_aux_states_change_and_the_given_batch_never(kind: type[TransformTensors]) -> None:
    given = batch()
    before = {name: tensor.clone() for name, tensor in given.items()}
    noisy = kind(0.1)(given, generator())
    assert noisy is not given
    assert not torch.equal(noisy["hidden_states"], before["hidden_states"])
    assert all(noisy[name] is given[name] for name in given if name != "hidden_states")
    assert all(torch.equal(given[name], before[name]) for name in given)


def test_the_named_tensors_are_the_ones_that_change() -> None:
    noisy = AddUniformNoise(0.1, tensors=("verifier_last_hidden_states",))(batch(), generator())
    assert not noisy["hidden_states"].any()
    assert (noisy["verifier_last_hidden_states"] != 1).any()


@pytest.mark.parametrize("kind", [AddUniformNoise, AddGaussianNoise])
def test_a_generator_decides_the_noise_and_the_global_one_is_left_alone(kind: type[TransformTensors]) -> None:
    state = torch.get_rng_state()
    draw = [kind(0.1)(batch(), generator(seed))["hidden_states"] for seed in (1, 1, 2)]
    assert torch.equal(draw[0], draw[1])
    assert not torch.equal(draw[0], draw[2])
    assert torch.equal(torch.get_rng_state(), state)
    one = generator(1)
    first, second = kind(0.1)(batch(), one), kind(0.1)(batch(), one)
    assert not torch.equal(first["hidden_states"], second["hidden_states"])


def test_std_is_another_name_of_scale() -> None:
    assert AddUniformNoise(std=0.2).scale == AddUniformNoise(0.2).scale == 0.2
    assert AddUniformNoise().scale == 0.05
    with pytest.raises(ValueError, match="two names of one number"):
        AddUniformNoise(0.1, std=0.1)


@pytest.mark.parametrize("scale", [-0.1, float("nan"), float("inf")])
def test_a_scale_that_is_no_width_is_refused(scale: float) -> None:
    with pytest.raises(ValueError, match="finite and >= 0"):
        AddUniformNoise(scale)
    with pytest.raises(UserError, match=r"noise\.scale"):
        build_noise(NoiseConfig(NoiseKind.uniform, scale))


def test_a_configuration_builds_its_transform_or_none() -> None:
    uniform = build_noise(NoiseConfig(NoiseKind.uniform, 0.3))
    assert isinstance(uniform, AddUniformNoise)
    assert uniform.scale == 0.3
    assert isinstance(build_noise(NoiseConfig(NoiseKind.gaussian, 0.1)), AddGaussianNoise)
    assert build_noise(NoiseConfig()) is None
    assert build_noise(NoiseConfig(NoiseKind.uniform, 0.0)) is None
