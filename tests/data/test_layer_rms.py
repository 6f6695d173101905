"""The size of states and of noise beside them, against plain loops and against noise that was drawn."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.data import Eagle3SampleFileDataset, build_noise
from eagle3lab.data.layer_rms import LayerRms, measure_layer_rms, noise_ratios
from eagle3lab.store.reader import StoreReader

IDS = (2, 4, 5)


def token_sizes(data: Eagle3SampleFileDataset, rows: list[int], layer: int, num_layers: int) -> list[float]:
    sizes = []
    for row in rows:
        for state in data[row]["hidden_states"]:
            values = state.view(num_layers, -1)[layer].tolist()
            sizes.append(math.sqrt(sum(v * v for v in values) / len(values)))
    return sizes


@pytest.mark.parametrize(("ids", "num_rows"), [(IDS, 100), (IDS, 4), ((4,), 4)])
def test_a_layers_rms_is_the_median_of_its_tokens(store: Path, ids: tuple[int, ...], num_rows: int) -> None:
    rms = measure_layer_rms(StoreReader(store), ids, num_rows=num_rows)
    data = Eagle3SampleFileDataset(store, split="train", aux_layer_ids=ids)
    rows = [i * len(data) // num_rows for i in range(num_rows)] if num_rows < len(data) else range(len(data))
    assert rms.layer_ids == ids
    assert list(rms.lengths) == [data.lengths[row] + 1 for row in rows]
    for layer, found in enumerate(rms.typical):
        sizes = token_sizes(data, list(rows), layer, len(ids))
        assert found == pytest.approx(statistics.median_low(sizes), rel=1e-5)


def test_a_few_huge_states_do_not_change_it(tmp_path: Path, make: SimpleNamespace) -> None:
    """The first token of a row often holds states a hundred times as large as the others'."""
    samples, sizes = make.samples(), []
    for factor in (1, 500):
        for sample in samples:
            sample.states[0] *= factor
        make.store(tmp_path / str(factor), samples)
        sizes.append(measure_layer_rms(StoreReader(tmp_path / str(factor)), IDS).typical)
    assert all(b / a < 1.2 for a, b in zip(*sizes, strict=True))


@pytest.mark.parametrize(
    "noise",
    [
        NoiseConfig(NoiseKind.uniform, 0.05),
        NoiseConfig(NoiseKind.gaussian, 0.1),
        NoiseConfig(NoiseKind.eagle, 0.2),
        NoiseConfig(NoiseKind.uniform, 0.05, relative=True),
        NoiseConfig(NoiseKind.gaussian, 0.1, relative=True),
    ],
    ids=lambda n: f"{n.kind.value}{'-relative' * n.relative}",
)
def test_the_ratio_told_is_that_of_noise_that_was_drawn(noise: NoiseConfig) -> None:
    rms = LayerRms((2, 5), (0.5, 8.0), (300, 100))
    transform = build_noise(noise, rms.typical)
    assert transform is not None
    width, generator = 200, torch.Generator().manual_seed(0)
    squares = torch.zeros(2, dtype=torch.float64)
    for length in rms.lengths:
        drawn = transform({"hidden_states": torch.zeros(length, 2 * width)}, generator)["hidden_states"]
        squares += drawn.double().view(length, 2, width).square().mean(-1).sum(0)
    sizes = (squares / sum(rms.lengths)).sqrt()
    expected = [float(size) / layer for size, layer in zip(sizes, rms.typical, strict=True)]
    assert noise_ratios(noise, rms) == pytest.approx(expected, rel=0.01)


def test_no_noise_has_no_size() -> None:
    assert noise_ratios(NoiseConfig(), LayerRms((2,), (3.0,), (10,))) == (0.0,)
