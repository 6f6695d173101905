"""The moving average of the weights: its values, where it is used, and that training does not feel it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import OptimConfig, TrainerConfig
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.checkpoint_state import load_weights
from eagle3lab.training.trainer import fit
from eagle3lab.training.weight_average import WeightAverage, weights_label

DECAY, UPDATES = 0.3, 5


def config(tiny: ModuleType, updates: int) -> TrainerConfig:
    return TrainerConfig(
        seq_len=tiny.SEQ_LEN,
        tokens_per_update=2 * tiny.SEQ_LEN,
        max_epochs=None,
        max_updates=updates,
        log_every_updates=1,
        save_every_updates=1,
    )


def optim(tiny: ModuleType) -> OptimConfig:
    return tiny.optim(ema_decay=DECAY)


@pytest.fixture(scope="module")
def raw(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path_factory: Any
) -> list[dict[str, Tensor]]:
    """Weights after 0, 1, ... updates of a run without an average, each from a run of that length."""
    path = tmp_path_factory.mktemp("raw")
    first = tiny.weights(tiny.build(store, config(tiny, 1))[0])
    lengths = range(1, UPDATES + 1)
    return [first, *(tiny.weights(train_run(store, path / str(n), config(tiny, n))[0]) for n in lengths)]


@pytest.fixture(scope="module")
def averaged(tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path_factory: Any) -> Any:
    path = tmp_path_factory.mktemp("averaged")
    return path, *train_run(store, path, config(tiny, UPDATES), optim=optim(tiny))


def average_of(path: Path) -> dict[str, Tensor]:
    return torch.load(path / "checkpoints" / "last.ckpt", weights_only=True)["average"]


def test_it_is_the_recurrence_over_the_weights_of_every_update(
    averaged: Any, raw: list[dict[str, Tensor]]
) -> None:
    got = average_of(averaged[0])
    assert {t.dtype for t in got.values()} == {torch.float32}
    for name, first in raw[0].items():
        wanted = first.double()
        for n in range(1, UPDATES + 1):
            decay = min(DECAY, (1 + n) / (10 + n))
            wanted = decay * wanted + (1 - decay) * raw[n][name].double()
        assert torch.allclose(got[name].double(), wanted, rtol=1e-5, atol=1e-7), name
        assert not torch.equal(got[name], raw[-1][name])


def test_training_goes_on_from_the_weights_not_from_their_average(
    tiny: ModuleType, averaged: Any, raw: list[dict[str, Tensor]]
) -> None:
    trained = tiny.weights(averaged[1])
    assert all(torch.equal(trained[name], raw[-1][name]) for name in trained)


def test_the_average_is_what_is_validated_and_exported(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, averaged: Any
) -> None:
    path, _, summary = averaged
    module, _ = tiny.build(store, config(tiny, 1))
    assert load_weights(module.draft, path / "checkpoints" / "last.ckpt") == UPDATES
    exported, average = tiny.weights(module), average_of(path)
    assert all(torch.equal(exported[name], average[name]) for name in average)

    # the same figures from a run that holds these weights and does not move
    checked, data = tiny.build(store, config(tiny, 1), optim=tiny.optim(lr=1e-30, grad_clip_norm=None))
    checked.draft.load_state_dict(exported, strict=False)
    still = fit(
        checked, data, hardware=tiny.hardware(), train=config(tiny, 1), run_dir=tmp_path
    ).last_validation
    places = ("update", "tokens")
    assert {k: v for k, v in still.items() if k not in places} == pytest.approx(
        {k: v for k, v in summary.last_validation.items() if k not in places}, rel=1e-6
    )


def test_a_resumed_run_has_the_same_average(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, averaged: Any
) -> None:
    train_run(store, tmp_path, config(tiny, 3), optim=optim(tiny))
    train_run(store, tmp_path, config(tiny, UPDATES), optim=optim(tiny), resume=True)
    wanted = average_of(averaged[0])
    assert all(torch.equal(average, wanted[name]) for name, average in average_of(tmp_path).items())


@pytest.mark.parametrize("begun_with", [True, False])
def test_a_run_cannot_gain_or_lose_its_average_when_it_is_resumed(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, begun_with: bool
) -> None:
    first, then = optim(tiny), replace(optim(tiny), ema_decay=None)
    if not begun_with:
        first, then = then, first
    train_run(store, tmp_path, config(tiny, 1), optim=first)
    with pytest.raises(UserError, match=r"optim\.ema_decay"):
        train_run(store, tmp_path, config(tiny, 2), optim=then, resume=True)


def test_an_exchange_keeps_the_memory_of_the_weights_and_two_change_nothing() -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    average = WeightAverage([("w", weight)], 0.5, {"w": torch.ones(3)})
    place = weight.data_ptr()
    average.exchange()
    assert weight.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(AssertionError):
        average.state_dict()
    average.exchange()
    assert weight.tolist() == [0.0, 0.0, 0.0]
    assert weight.data_ptr() == place
    assert average.state_dict()["w"].tolist() == [1.0, 1.0, 1.0]


def test_the_label_says_which_weights_they_are() -> None:
    assert weights_label(OptimConfig()) == "raw"
    assert weights_label(OptimConfig(ema_decay=0.999)) == "averaged (ema_decay 0.999)"
