from __future__ import annotations

import pytest
import torch

from eagle3lab.training.metrics import Sums, metric_names, train_figures, validation_figures

COUNTS = {
    "loss_step": [100.0, 50.0, 25.0],
    "correct": [80.0, 55.0, 30.0],
    "prefix_correct": [80.0, 48.0, 24.0],
    "totals": [100.0, 100.0, 100.0],
    "covered": [97.0],
}


def test_simulated_acceptance_length_counts_prefixes_and_the_bonus_token() -> None:
    figures = validation_figures(COUNTS, step_decay=0.5)
    assert figures["val/simulated_acceptance_length"] == pytest.approx(2.52)
    assert [figures[f"val/acceptance_step{k}"] for k in range(3)] == pytest.approx([0.8, 0.48, 0.24])
    assert [figures[f"val/conditional_accuracy_step{k}"] for k in range(3)] == pytest.approx([0.8, 0.6, 0.5])
    assert [figures[f"val/accuracy_step{k}"] for k in range(3)] == pytest.approx([0.8, 0.55, 0.3])
    assert figures["val/loss"] == pytest.approx(1.0 + 0.25 + 0.0625)
    assert figures["val/coverage"] == pytest.approx(0.97)


def test_figures_of_nothing_are_zero_not_nan() -> None:
    nothing = {name: [0.0] * len(values) for name, values in COUNTS.items()}
    figures = validation_figures(nothing, 1.0)
    assert figures["val/simulated_acceptance_length"] == 1.0
    assert all(value == value for value in figures.values())


def test_every_figure_has_a_column() -> None:
    names = metric_names(3)
    assert names[:2] == ["update", "tokens"]
    assert len(names) == len(set(names))
    sums = {"updates": [1.0], "loss": [1.0], "covered": [1.0], "grad_norm": [1.0]}
    sums |= {name: [1.0] * 3 for name in ("loss_step", "supervised_step", "correct_step")}
    assert set(train_figures(sums)) | set(validation_figures(COUNTS, 1.0)) <= set(names)


def test_one_tensor_under_two_names_stays_itself_when_reduced_twice() -> None:
    total = torch.tensor([14.0])
    sums = Sums({"total": 1, "again": 1}, "cpu")
    sums.add({"total": total, "again": total})
    assert sums.reduce() == sums.reduce() == {"total": [14.0], "again": [14.0]}
    assert total.tolist() == [14.0]
