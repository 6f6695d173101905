"""Training with the pruned step: whole runs, its plans made by the loader, and what a module is built with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3lab.config.noise import NoiseConfig
from eagle3lab.config.schema import (
    Accelerator,
    Attention,
    DraftConfig,
    LossConfig,
    LossKind,
    Normalisation,
    OptimConfig,
    Precision,
    Schedule,
    TrainerConfig,
    TrainingStep,
)
from eagle3lab.draft.frozen import shrink_frozen
from eagle3lab.draft.pruned.plan import PLAN, PrunedPlan
from eagle3lab.store.reader import StoreReader
from eagle3lab.training import module as training_module
from eagle3lab.training.build import build_module, pack_preparer
from eagle3lab.training.trainer import fit

OPTIM = OptimConfig(lr=1e-3, schedule=Schedule.constant)


@pytest.mark.parametrize(
    "loss",
    [
        LossConfig(step_decay=0.8),
        LossConfig(kind=LossKind.js, normalisation=Normalisation.sequence),
    ],
    ids=lambda loss: loss.kind.value,
)
def test_a_run_ends_with_the_weights_and_figures_of_the_reference(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any, loss: LossConfig
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=4, validate_every_updates=2)
    runs = [
        train_run(store, tmp_path / step.value, train, step=step, loss=loss, noise=0.05, optim=OPTIM)
        for step in TrainingStep
    ]
    (pruned, own), (reference, expected) = runs
    start = tiny.weights(tiny.build(store, train)[0])
    for name, weight in tiny.weights(reference).items():
        moved = float((weight - start[name]).abs().max())
        assert float((tiny.weights(pruned)[name] - weight).abs().max()) < 0.02 * moved, name
    for key, value in expected.last_validation.items():
        assert own.last_validation[key] == pytest.approx(value, rel=1e-4), key


def test_a_plan_made_by_the_loaders_threads_changes_nothing(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=3)
    plans: list[Any] = []
    original = training_module.pruned_forward

    def spy(*args: Any, plan: PrunedPlan | None, **kwargs: Any) -> Any:
        plans.append(plan)
        return original(*args, plan=plan, **kwargs)

    monkeypatch.setattr(training_module, "pruned_forward", spy)
    weights = []
    for threads in (0, 2):
        module, data = tiny.build(store, train, step=TrainingStep.pruned, threads=threads)
        if threads:
            draft = DraftConfig(name="test", ttt_steps=tiny.TTT_STEPS)
            data.prepare = pack_preparer(draft, tiny.hardware())
        fit(module, data, hardware=tiny.hardware(), train=train, run_dir=tmp_path / str(threads))
        weights.append(tiny.weights(module))
    assert {type(plan) for plan in plans} == {type(None), PrunedPlan}
    assert all(torch.equal(weights[1][name], weight) for name, weight in weights[0].items())


def test_a_checkpoint_of_one_shared_head_goes_on_in_a_draft_with_two(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, train_run: Any
) -> None:
    """A bf16 run holds equal heads once; neither head is the checkpoint's, so any other run can go on."""
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=2)
    module, data = tiny.build(store, train, step=TrainingStep.pruned)
    shrink_frozen(module.draft, torch.bfloat16)
    assert module.draft.verifier_lm_head.weight is module.draft.lm_head.weight
    fit(module, data, hardware=tiny.hardware(), train=train, run_dir=tmp_path)
    held = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    assert set(held) == {f"draft.{name}" for name in tiny.weights(module)} | {"draft.t2d", "draft.d2t"}
    longer = replace(train, max_updates=3)
    _, summary = train_run(store, tmp_path, longer, resume=True, step=TrainingStep.reference)
    assert (summary.resumed_from_update, summary.updates) == (2, 3)


def test_only_the_pruned_step_has_plans_and_small_frozen_weights(
    tiny: ModuleType, store: StoreReader
) -> None:
    gpu = replace(tiny.hardware(), accelerator=Accelerator.cuda, attention=Attention.flex)
    draft = DraftConfig(name="test", num_layers=2, sliding_window=8)
    assert pack_preparer(replace(draft, step=TrainingStep.reference), gpu) is None
    prepare = pack_preparer(draft, gpu)
    assert prepare is not None
    batch = {"document_ids": torch.zeros(1, 256, dtype=torch.long), "loss_mask": torch.ones(1, 256)}
    plan = prepare(batch)[PLAN]
    assert set(plan.blocks) == {("rows", 8), ("context", 8)}
    assert plan.rows.numel() % 128 == 0

    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=1)
    for step in TrainingStep:
        made, data = tiny.build(store, train)
        with torch.no_grad():
            made.draft.lm_head.weight.copy_(made.draft.lm_head.weight.bfloat16())
        module = build_module(
            made.draft,
            made.plan,
            data,
            hardware=replace(tiny.hardware(), precision=Precision.bf16),
            ttt_steps=tiny.TTT_STEPS,
            loss=LossConfig(),
            optim=OPTIM,
            noise=NoiseConfig(),
            seed=0,
            vocabulary=tiny.VOCABULARY,
            edge=tiny.edge_weights(),
            rms_norm_eps=1e-5,
            step=step,
        )
        small = step is TrainingStep.pruned
        assert (module.pruned_loss is not None) is small
        assert module.draft.lm_head.weight.dtype == (torch.bfloat16 if small else torch.float32)
        assert module.draft.fc.weight.dtype == torch.float32
