"""Plans against what was measured or counted independently."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.plan import StoreCounts, TrainPlan, draft_size, plan_extraction, plan_training
from eagle3lab.config.plan_text import describe_extraction, describe_training, require_fit
from eagle3lab.config.schema import (
    DraftConfig,
    HardwareConfig,
    LastState,
    OptimConfig,
    OptimKind,
    Precision,
    Shapes,
    StoreDtype,
    Strategy,
    TrainerConfig,
    TrainingStep,
)
from eagle3lab.config.selection import AcceptanceConfig
from eagle3lab.store.disk import estimate_bytes

QWEN3_8B = Shapes(4096, 12288, 36, 32, 8, 128, 151936, 8190735360)
H200 = HardwareConfig(
    name="h200", precision=Precision.bf16, peak_tflops=785, assumed_mfu=0.61, device_memory_gib=139.8
)


def test_the_draft_of_qwen3_8b_has_the_parameters_of_its_matrices() -> None:
    h, ffn, kv, vocab = 4096, 12288, 1024, 32000
    matrices = 3 * h * h + 2 * h * h + 2 * (2 * h * kv) + h * h + 3 * h * ffn
    size = draft_size(DraftConfig(name="eagle3"), QWEN3_8B, num_aux=3)
    assert size.trainable == matrices + 4 * h  # four norm vectors
    assert size.frozen == 151936 * h + 2 * vocab * h + h


@pytest.mark.parametrize(("ttt_steps", "gib", "tokens_per_second"), [(3, 16.1, 78_100), (7, 27.6, 34_400)])
def test_memory_and_speed_agree_with_the_measured_baseline(
    ttt_steps: int, gib: float, tokens_per_second: float
) -> None:
    plan = plan_training(
        DraftConfig(name="eagle3", ttt_steps=ttt_steps, step=TrainingStep.reference),
        QWEN3_8B,
        H200,
        TrainerConfig(seq_len=8192),
        num_aux=3,
        num_devices_per_node=1,
        store=None,
    )
    # the figure is of the bare step; `train.py` also holds the head that validation needs
    head = plan.memory_gib["verifier's whole head, for validation"]
    assert head == 151936 * 4096 * 2 / 2**30
    assert plan.total_gib - head == pytest.approx(gib, rel=0.15)
    assert plan.tokens_per_second == pytest.approx(tokens_per_second, rel=0.1)


def test_decoding_while_training_takes_the_verifier_and_a_second_draft() -> None:
    def total(train: TrainerConfig) -> float:
        draft = DraftConfig(name="eagle3")
        plan = plan_training(draft, QWEN3_8B, H200, train, num_aux=3, num_devices_per_node=1, store=None)
        return plan.total_gib

    size = draft_size(DraftConfig(name="eagle3"), QWEN3_8B, num_aux=3)
    decoding = TrainerConfig(seq_len=8192, acceptance=AcceptanceConfig(every_updates=100))
    more = 2 * (8190735360 + size.trainable + size.frozen) / 2**30
    assert total(decoding) - total(TrainerConfig(seq_len=8192)) == pytest.approx(more)


@pytest.mark.parametrize(("max_tokens", "updates"), [(100, 1), (8192, 1), (8193, 2)])
def test_the_update_that_reaches_a_token_budget_is_planned(max_tokens: int, updates: int) -> None:
    train = TrainerConfig(seq_len=8192, max_epochs=None, max_tokens=max_tokens)
    draft = DraftConfig(name="eagle3")
    plan = plan_training(draft, QWEN3_8B, H200, train, num_aux=3, num_devices_per_node=1, store=None)
    assert plan.num_updates == updates
    assert plan.hours is not None


def test_a_store_with_hardly_a_supervised_token_can_be_planned() -> None:
    store = StoreCounts(num_tokens=10_000, supervised_share=0.0, dtype=StoreDtype.bfloat16)
    draft, train = DraftConfig(name="eagle3"), TrainerConfig(seq_len=8192)
    plan = plan_training(draft, QWEN3_8B, H200, train, num_aux=3, num_devices_per_node=1, store=store)
    assert plan.tokens_per_second is not None


def test_a_plan_that_cannot_fit_is_refused_with_what_would() -> None:
    hardware = HardwareConfig(name="small", precision=Precision.bf16, device_memory_gib=12)
    plan = plan_training(
        DraftConfig(name="eagle3", ttt_steps=7),
        QWEN3_8B,
        hardware,
        TrainerConfig(seq_len=8192),
        num_aux=3,
        num_devices_per_node=1,
        store=None,
    )
    with pytest.raises(UserError, match=r"does not fit small(.|\n)*train\.seq_len at \d+%"):
        require_fit(plan, hardware)
    assert "memory per device" in describe_training(plan, hardware, {})


@pytest.mark.parametrize(
    ("strategy", "optim", "copies"),
    [
        (Strategy.ddp, OptimConfig(), 1 + 1 + 2),  # weights, gradients, two moments
        (Strategy.ddp, OptimConfig(kind=OptimKind.muon), 1 + 1 + 1),  # one momentum
        (Strategy.ddp, OptimConfig(ema_decay=0.999), 1 + 1 + 2 + 1),
        (Strategy.fsdp2, OptimConfig(), 2 * (1 + 1 / 4) + 2 / 4),  # whole ones for a step, quarters always
        (Strategy.fsdp2, OptimConfig(ema_decay=0.999), 2 * (1 + 1 / 4) + 2 / 4 + 1 / 4),
    ],
)
def test_strategy_and_optimizer_decide_how_often_a_weight_is_held(
    strategy: Strategy, optim: OptimConfig, copies: float
) -> None:
    plan = plan_training(
        DraftConfig(name="eagle3"),
        QWEN3_8B,
        HardwareConfig(name="h200x4", strategy=strategy),
        TrainerConfig(seq_len=8192),
        num_aux=3,
        num_devices_per_node=4,
        store=None,
        optim=optim,
    )
    held = sum(gib for part, gib in plan.memory_gib.items() if "(fp32)" in part)
    assert held == pytest.approx(copies * plan.size.trainable * 4 / 2**30)


@pytest.mark.parametrize("dtype", StoreDtype)
def test_the_planned_bytes_are_those_that_the_store_estimates(dtype: StoreDtype) -> None:
    plan = plan_extraction(
        QWEN3_8B, H200, num_layer_ids=3, num_devices_per_node=1, num_tokens=1000, dtype=dtype
    )
    beside_states = 9  # an id and a mask
    assert plan.bytes_per_token == estimate_bytes(1, 4096, 3, dtype.value) + beside_states
    assert plan.disk_gb == pytest.approx(1000 * plan.bytes_per_token / 1e9)


@pytest.mark.parametrize("dtype", StoreDtype)
def test_the_plan_of_supervised_last_states_is_a_range(dtype: StoreDtype) -> None:
    """How much is supervised is known once the data are read: between nothing and everything."""
    kinds = {"num_layer_ids": 3, "num_devices_per_node": 1, "num_tokens": 1000, "dtype": dtype}
    plan = plan_extraction(QWEN3_8B, H200, **kinds, last_state=LastState.supervised)
    whole = plan_extraction(QWEN3_8B, H200, **kinds)
    assert plan.min_bytes_per_token == estimate_bytes(1, 4096, 3, dtype.value, 0) + 9
    assert plan.bytes_per_token == whole.bytes_per_token == whole.min_bytes_per_token
    text = describe_extraction(plan, H200, {})
    assert f"{plan.min_bytes_per_token:,} to {plan.bytes_per_token:,} bytes per token, at most 0." in text
    assert f"  {whole.bytes_per_token:,} bytes per token, 0." in describe_extraction(whole, H200, {})


def test_a_store_tells_the_plan_its_size_its_supervised_share_and_its_bytes(tmp_path: Path) -> None:
    assert StoreCounts.read(tmp_path) is None
    manifest = {"num_tokens": 970_000, "num_supervised": 242_500, "dtype": "float8_e4m3"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    store = StoreCounts.read(tmp_path)
    assert store == StoreCounts(970_000, 0.25, StoreDtype.float8_e4m3)

    def plan(store: StoreCounts | None, step: TrainingStep) -> TrainPlan:
        draft, train = DraftConfig(name="eagle3", step=step), TrainerConfig(seq_len=8192, max_epochs=2)
        return plan_training(draft, QWEN3_8B, H200, train, num_aux=3, num_devices_per_node=1, store=store)

    some = replace(store, last_state=LastState.supervised)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest | {"last_state_rows": "supervised"}))
    assert StoreCounts.read(tmp_path) == some
    assert plan(some, TrainingStep.pruned).store_bytes_per_token == round(3.25 * (4096 + 4)) + 9
    pruned, reference = plan(store, TrainingStep.pruned), plan(store, TrainingStep.reference)
    assert pruned.num_updates == 2 * round(970_000 / 0.97 / 8192)
    assert pruned.store_bytes_per_token == 4 * (4096 + 4) + 9
    assert pruned.tokens_per_second is not None
    assert reference.tokens_per_second is not None
    assert pruned.tokens_per_second > 2.5 * reference.tokens_per_second
    assert plan(None, TrainingStep.pruned).store_bytes_per_token == 4 * 4096 * 2 + 9


def test_a_trained_head_is_counted_as_trained_and_a_share_of_the_data_makes_fewer_updates() -> None:
    frozen, trained = (
        draft_size(DraftConfig(name="eagle3", train_head=train), QWEN3_8B, num_aux=3)
        for train in (False, True)
    )
    assert trained.trainable - frozen.trainable == frozen.frozen - trained.frozen == 32000 * 4096
    updates = [
        plan_training(
            DraftConfig(name="eagle3"),
            QWEN3_8B,
            H200,
            TrainerConfig(seq_len=8192, data_share=share),
            num_aux=3,
            num_devices_per_node=1,
            store=StoreCounts(97 * 8192, 0.5, StoreDtype.bfloat16),
        ).num_updates
        for share in (1.0, 0.25)
    ]
    assert updates == [100, 25]
