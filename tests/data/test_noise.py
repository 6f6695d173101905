"""Noise: its width, its generator, and what it leaves alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from eagle3lab.config.errors import UserError
from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.data import AddGaussianNoise, AddUniformNoise, TransformTensors, build_noise
from eagle3lab.data.noise import AddLengthScaledNoise


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


def pack() -> dict[str, Any]:
    """Rows of 7 and 3 tokens after the shift (8 and 4 before it), and 2 places of padding."""
    return {
        "hidden_states": torch.zeros(1, 12, 6),
        "document_ids": torch.tensor([[0] * 7 + [1] * 3 + [-1] * 2]),
        "lengths": torch.tensor([7, 3]),
    }


def test_eagle_noise_is_the_first_eagle_trainers_in_every_row_of_a_pack() -> None:
    """(rand - 0.5) * std * 512 / T, with the T tokens that the row has before the shift, written out by hand."""
    noise = AddLengthScaledNoise(0.2)(pack(), generator(3))["hidden_states"]
    drawn = torch.rand(1, 12, 6, generator=generator(3))
    for place, tokens in [*((p, 8) for p in range(7)), *((p, 4) for p in range(7, 10))]:
        for column in range(6):
            expected = (float(drawn[0, place, column]) - 0.5) * 0.2 * 512 / tokens
            assert float(noise[0, place, column]) == pytest.approx(expected, rel=1e-6, abs=1e-7)


def test_eagle_noise_of_a_row_alone_counts_its_own_tokens() -> None:
    row = {"hidden_states": torch.zeros(256, 4)}
    noise = AddLengthScaledNoise(0.2)(row, generator(3))["hidden_states"]
    expected = (torch.rand(256, 4, generator=generator(3)) - 0.5) * 0.2 * 512 / 256
    torch.testing.assert_close(noise, expected)


@pytest.mark.parametrize("kind", [AddUniformNoise, AddGaussianNoise])
def test_relative_noise_is_the_plain_noise_times_each_layers_rms(kind: type[TransformTensors]) -> None:
    sizes = (0.5, 60.0, 0.0)
    plain = kind(0.1)(batch(50, 30), generator())["hidden_states"]
    relative = kind(0.1, layer_rms=sizes)(batch(50, 30), generator())["hidden_states"]
    for layer, size in enumerate(sizes):
        columns = slice(10 * layer, 10 * (layer + 1))
        torch.testing.assert_close(relative[..., columns], plain[..., columns] * size)


def test_layers_that_do_not_make_the_width_are_refused() -> None:
    with pytest.raises(ValueError, match="3 layers do not make a width of 10"):
        AddUniformNoise(0.1, layer_rms=(1.0, 1.0, 1.0))(batch(4, 10), generator())
    with pytest.raises(ValueError, match="must be finite"):
        AddUniformNoise(0.1, layer_rms=(1.0, math.nan))


def test_kinds_and_relative_noise_are_built_from_the_configuration() -> None:
    eagle = build_noise(NoiseConfig(NoiseKind.eagle, 0.2))
    assert isinstance(eagle, AddLengthScaledNoise)
    relative = build_noise(NoiseConfig(NoiseKind.gaussian, 0.1, relative=True), (1.0, 2.0))
    assert isinstance(relative, AddGaussianNoise)
    assert relative.layer_rms == (1.0, 2.0)
    plain = build_noise(NoiseConfig(NoiseKind.gaussian, 0.1), (1.0, 2.0))
    assert plain is not None
    assert plain.layer_rms is None
    with pytest.raises(ValueError, match="needs the RMS"):
        build_noise(NoiseConfig(NoiseKind.gaussian, 0.1, relative=True))
