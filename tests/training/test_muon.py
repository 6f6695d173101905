"""Muon for the matrices and AdamW for the rest, as one optimizer to the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import OptimConfig, OptimKind, Schedule, TrainerConfig
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.optim import build_optimizers, muon_takes, set_learning_rate

LR = 1e-2


def config(tiny: ModuleType, updates: int) -> TrainerConfig:
    return TrainerConfig(
        seq_len=tiny.SEQ_LEN,
        tokens_per_update=2 * tiny.SEQ_LEN,
        max_epochs=None,
        max_updates=updates,
        log_every_updates=1,
    )


def muon(tiny: ModuleType, **fields: Any) -> OptimConfig:
    return tiny.optim(kind=OptimKind.muon, lr=LR, **fields)


def test_matrices_are_muons_and_norms_adamws(tiny: ModuleType, store: StoreReader) -> None:
    module, _ = tiny.build(store, config(tiny, 1), optim=muon(tiny))
    first, second = module.configure_optimizers()
    assert isinstance(first, torch.optim.Muon)
    assert isinstance(second, torch.optim.AdamW)
    names = {id(p): name for name, p in module.draft.named_parameters()}
    of = [{names[id(p)] for group in o.param_groups for p in group["params"]} for o in (first, second)]
    assert {"fc.weight", "layers.0.self_attn.q_proj.weight", "layers.0.mlp.down_proj.weight"} <= of[0]
    assert {"norm.weight", "layers.0.hidden_norm.weight"} <= of[1]
    assert of[0] | of[1] == {name for name, p in module.draft.named_parameters() if p.requires_grad}
    assert not of[0] & of[1]


def test_embeddings_heads_and_single_rows_are_adamws() -> None:
    matrix, row = nn.Parameter(torch.zeros(4, 8)), nn.Parameter(torch.zeros(1, 8))
    assert muon_takes("fc.weight", matrix)
    assert not muon_takes("embed_tokens.weight", matrix)
    assert not muon_takes("lm_head.weight", matrix)
    assert not muon_takes("gate.weight", row)


@pytest.mark.parametrize("shape", [(24, 24), (16, 48), (48, 16)])
def test_a_first_step_is_the_gradients_orthogonal_factor_at_adamws_size(shape: tuple[int, int]) -> None:
    """The orthogonal factor of a singular value decomposition in fp64 has all singular values 1; Muon's
    iteration reaches 0.7 to 1.3. AdamW moves every weight by about lr; 0.2 * lr is its usual root mean square."""
    g = torch.Generator().manual_seed(1)
    weight, gradient = torch.randn(shape, generator=g), torch.randn(shape, generator=g)
    parameter = nn.Parameter(weight.clone())
    (optimizer,) = build_optimizers([("fc.weight", parameter)], OptimConfig(kind=OptimKind.muon, lr=LR))
    parameter.grad = gradient.clone()
    optimizer.step()
    moved = (weight - parameter.detach()).double() / (LR * 0.2 * max(shape) ** 0.5)
    left, values, right = torch.linalg.svd(moved, full_matrices=False)
    assert 0.6 < float(values.min()) <= float(values.max()) < 1.35
    wanted_left, _, wanted_right = torch.linalg.svd(gradient.double(), full_matrices=False)
    assert torch.allclose(left @ right, wanted_left @ wanted_right, atol=0.02)
    rms = float((weight - parameter.detach()).pow(2).mean().sqrt())
    assert rms == pytest.approx(0.2 * LR, rel=0.25)


def test_both_follow_one_curve_to_their_own_peaks() -> None:
    parameters = [
        ("fc.weight", nn.Parameter(torch.zeros(4, 4))),
        ("norm.weight", nn.Parameter(torch.zeros(4))),
    ]
    optim = OptimConfig(kind=OptimKind.muon, lr=1e-3, muon_lr=2e-2)
    optimizers = build_optimizers(parameters, optim)
    for rate in (1e-3, 2.5e-4):
        for optimizer in optimizers:
            set_learning_rate(optimizer, rate, optim)
        assert [o.param_groups[0]["lr"] for o in optimizers] == pytest.approx([20 * rate, rate])


def test_it_learns_and_a_resumed_run_equals_the_uninterrupted_one(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    optim = muon(tiny, schedule=Schedule.constant, weight_decay=0.1)
    whole, summary = train_run(store, tmp_path / "whole", config(tiny, 6), optim=optim, noise=0.05)
    train_run(store, tmp_path / "cut", config(tiny, 3), optim=optim, noise=0.05)
    again, _ = train_run(store, tmp_path / "cut", config(tiny, 6), optim=optim, noise=0.05, resume=True)
    wanted, got = tiny.weights(whole), tiny.weights(again)
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)
    states = [
        torch.load(tmp_path / name / "checkpoints" / "last.ckpt", weights_only=True)["optimizer_states"]
        for name in ("whole", "cut")
    ]
    kept = [
        [t for optimizer in state for values in optimizer["state"].values() for t in values.values()]
        for state in states
    ]
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))
    assert {t.dtype for t in kept[0]} == {torch.float32}
    assert summary.last["train/loss"] < 5


def test_states_of_another_optimizer_are_refused(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train_run(store, tmp_path, config(tiny, 1), optim=muon(tiny))
    with pytest.raises(UserError, match=r"optim\.kind=muon"):
        train_run(
            store, tmp_path, config(tiny, 2), optim=replace(muon(tiny), kind=OptimKind.adamw), resume=True
        )
