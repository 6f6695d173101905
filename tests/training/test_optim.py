from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import nn

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import OptimConfig, Schedule
from eagle3lab.training.optim import LearningRate, build_learning_rate, build_optimizers
from eagle3lab.training.run_plan import RunPlan

# linear, lr 1e-3, 4 warm-up updates, 10 in all
TABLE = [0.0, 0.00025, 0.0005, 0.00075, 0.001, 0.00083333, 0.00066667, 0.0005, 0.00033333, 0.00016667]


def plan_of(num_epochs: int, packs: int, micro_batches: int, replicas: int) -> RunPlan:
    lengths = [10] * packs
    return RunPlan(
        lambda epoch: [[row] for row in range(packs)],
        lengths,
        num_replicas=replicas,
        micro_batches=micro_batches,
        max_epochs=num_epochs,
    )


@pytest.mark.parametrize("epochs", [1, 2, 5])
@pytest.mark.parametrize(("micro_batches", "replicas"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_the_schedule_counts_updates_whatever_epochs_micro_batches_and_ranks(
    epochs: int, micro_batches: int, replicas: int
) -> None:
    plan = plan_of(epochs, 10 // epochs * micro_batches * replicas, micro_batches, replicas)
    rate = build_learning_rate(OptimConfig(lr=1e-3, schedule=Schedule.linear, lr_warmup_updates=4), plan)
    assert [rate(u) for u in range(10)] == pytest.approx(TABLE, abs=1e-7)


def test_a_warm_up_in_tokens_is_the_updates_that_see_them() -> None:
    plan = plan_of(1, 20, 2, 1)  # 20 tokens per update
    assert build_learning_rate(OptimConfig(lr_warmup_tokens=60), plan).warmup_updates == 3
    assert build_learning_rate(OptimConfig(lr_warmup_tokens=61), plan).warmup_updates == 4


def test_cosine_falls_from_the_peak_to_the_floor() -> None:
    rate = LearningRate(1.0, 100, 0, Schedule.cosine, 0.1)
    assert rate(0) == 1.0
    assert rate(50) == pytest.approx(0.55)
    assert rate(100) == pytest.approx(0.1)


def test_constant_stays_after_its_warm_up() -> None:
    rate = LearningRate(1.0, 10, 2, Schedule.constant)
    assert [rate(u) for u in (0, 1, 2, 9)] == [0.0, 0.5, 1.0, 1.0]


def test_a_single_update_at_rate_zero_is_refused() -> None:
    with pytest.raises(UserError, match="learning rate 0"):
        build_learning_rate(OptimConfig(lr_warmup_updates=5), plan_of(1, 1, 1, 1))


def test_frozen_parameters_are_not_optimised_and_norms_are_not_decayed() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    model[2].weight.requires_grad_(False)
    (optimizer,) = build_optimizers(model.named_parameters(), OptimConfig(weight_decay=0.1))
    held = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert id(model[2].weight) not in held
    assert held[id(model[0].weight)] == 0.1
    assert held[id(model[1].weight)] == held[id(model[0].bias)] == 0.0


def test_masters_below_fp32_are_refused() -> None:
    with pytest.raises(ValueError, match="fp32 masters"):
        build_optimizers(nn.Linear(2, 2).to(torch.bfloat16).named_parameters(), OptimConfig())


def test_only_the_trainable_part_of_a_draft_is_optimised(tiny: ModuleType, store: object) -> None:
    from eagle3lab.config.schema import TrainerConfig

    module, _ = tiny.build(store, TrainerConfig(seq_len=tiny.SEQ_LEN))
    names = {n for n, p in module.draft.named_parameters() if p.requires_grad}
    assert not names & {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }
    (optimizer,) = module.configure_optimizers()
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    assert held == {id(p) for n, p in module.draft.named_parameters() if n in names}


def test_a_warm_up_as_a_share_is_of_the_runs_updates() -> None:
    assert build_learning_rate(OptimConfig(lr_warmup_share=0.25), plan_of(2, 20, 2, 1)).warmup_updates == 5
    assert build_learning_rate(OptimConfig(lr_warmup_share=0.015), plan_of(1, 20, 1, 1)).warmup_updates == 0
