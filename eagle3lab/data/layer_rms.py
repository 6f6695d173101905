"""How large the states of each aux layer are, and how large noise is beside them.

A layer's RMS is that of its typical token: the median over tokens of the root mean square of a token's values.
The plain RMS over all values would say nothing, because the first token of a row and a few others hold states
a hundred times as large (SmolLM2-135M, layer 15: 60.8 over all values, 6.2 of the typical token, 1042 at most).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.noise import EAGLE_LENGTH
from eagle3lab.store.reader import StoreReader

NUM_ROWS = 16


@dataclass(frozen=True)
class LayerRms:
    """Of the aux layers of some rows. `lengths`: tokens of each of these rows."""

    layer_ids: tuple[int, ...]
    typical: tuple[float, ...]  # one for each layer
    lengths: tuple[int, ...]


def measure_layer_rms(
    store: StoreReader,
    aux_layer_ids: Sequence[int],
    *,
    data_share: float = 1.0,
    num_rows: int = NUM_ROWS,
) -> LayerRms:
    """Of at most `num_rows` training rows, evenly spaced in the store: the same on every rank and in every run."""
    data = Eagle3SampleFileDataset(store, split="train", aux_layer_ids=aux_layer_ids, data_share=data_share)
    rows = [i * len(data) // num_rows for i in range(num_rows)] if len(data) > num_rows else range(len(data))
    of_tokens, lengths = [], []
    for row in rows:
        states = data[row]["hidden_states"].float()
        by_layer = states.view(len(states), len(aux_layer_ids), -1)  # shape: [L, n_aux, hidden]
        of_tokens.append(by_layer.square().mean(dim=-1).sqrt())
        lengths.append(len(states) + 1)
    if not of_tokens:  # nothing to train on: whoever plans the run says so
        return LayerRms(tuple(aux_layer_ids), (0.0,) * len(aux_layer_ids), ())
    typical = torch.cat(of_tokens).median(dim=0).values
    return LayerRms(tuple(aux_layer_ids), tuple(typical.tolist()), tuple(lengths))


def noise_ratios(noise: NoiseConfig, rms: LayerRms) -> tuple[float, ...]:
    """RMS of the noise as a share of each layer's RMS; zeros without noise.

    U(-a, a) has an RMS of a / sqrt(3). Of `eagle` noise, which depends on a row's length, over the tokens of the
    measured rows.
    """
    sizes = {
        NoiseKind.none: 0.0,
        NoiseKind.uniform: noise.scale / math.sqrt(3),
        NoiseKind.gaussian: noise.scale,
        NoiseKind.eagle: _eagle_rms(noise.scale, rms.lengths),
    }
    size = sizes[noise.kind]
    return tuple(size if noise.relative else size / layer if layer else math.inf for layer in rms.typical)


def _eagle_rms(scale: float, lengths: Sequence[int]) -> float:
    """Root of the mean over tokens of the noise's mean square."""
    half_widths = [scale / 2 * EAGLE_LENGTH / length for length in lengths]
    squares = [length * a * a / 3 for length, a in zip(lengths, half_widths, strict=True)]
    return math.sqrt(sum(squares) / sum(lengths)) if lengths else 0.0
