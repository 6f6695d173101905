"""Plans against what was measured or counted independently."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3lab.config import plan_extraction as plan_extraction_module
from eagle3lab.config import plan_memory
from eagle3lab.config.errors import IntegrityError
from eagle3lab.config.plan_extraction import ExtractPlan, plan_extraction
from eagle3lab.config.plan_sizes import StoreCounts, draft_size
from eagle3lab.config.plan_text import describe_extraction
from eagle3lab.config.plan_training import TrainPlan, plan_training
from eagle3lab.config.schema import (
    Backend,
    DraftConfig,
    EngineConfig,
    ExtractorConfig,
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
from eagle3lab.draft.pruned import heads
from eagle3lab.engines import vllm_engine, vllm_files
from eagle3lab.extract import capture
from eagle3lab.store.disk import estimate_bytes

QWEN3_8B = Shapes(4096, 12288, 36, 32, 8, 128, 151936, 8190735360)
H200 = HardwareConfig(
    name="h200", precision=Precision.bf16, peak_tflops=785, assumed_mfu=0.61, device_memory_gib=139.8
)


def extraction(extract: ExtractorConfig, shapes: Shapes = QWEN3_8B, **hardware: object) -> ExtractPlan:
    return plan_extraction(
        shapes, replace(H200, **hardware), extract, num_layer_ids=3, num_tokens=1000, max_len=2048
    )


def test_the_draft_of_qwen3_8b_has_the_parameters_of_its_matrices() -> None:
    h, ffn, kv, vocab = 4096, 12288, 1024, 32000
    matrices = 3 * h * h + 2 * h * h + 2 * (2 * h * kv) + h * h + 3 * h * ffn
    size = draft_size(DraftConfig(name="eagle3"), QWEN3_8B, num_aux=3)
    assert size.trainable == matrices + 4 * h  # four norm vectors
    assert size.frozen == 151936 * h + 2 * vocab * h + h


def test_decoding_while_training_takes_the_verifier_and_a_second_draft() -> None:
    def total(train: TrainerConfig) -> float:
        draft = DraftConfig(name="eagle3")
        plan = plan_training(QWEN3_8B, draft, H200, train, num_aux=3, num_devices_per_node=1, store=None)
        return plan.total_gib

    size = draft_size(DraftConfig(name="eagle3"), QWEN3_8B, num_aux=3)
    decoding = TrainerConfig(seq_len=8192, acceptance=AcceptanceConfig(every_updates=100))
    more = 2 * (8190735360 + size.trainable + size.frozen) / 2**30
    assert total(decoding) - total(TrainerConfig(seq_len=8192)) == pytest.approx(more)


@pytest.mark.parametrize(("max_tokens", "updates"), [(100, 1), (8192, 1), (8193, 2)])
def test_the_update_that_reaches_a_token_budget_is_planned(max_tokens: int, updates: int) -> None:
    train = TrainerConfig(seq_len=8192, max_epochs=None, max_tokens=max_tokens)
    draft = DraftConfig(name="eagle3")
    plan = plan_training(QWEN3_8B, draft, H200, train, num_aux=3, num_devices_per_node=1, store=None)
    assert plan.num_updates == updates
    assert plan.hours is not None


def test_a_store_with_hardly_a_supervised_token_can_be_planned() -> None:
    store = StoreCounts(num_tokens=10_000, supervised_share=0.0, dtype=StoreDtype.bfloat16)
    draft, train = DraftConfig(name="eagle3"), TrainerConfig(seq_len=8192)
    plan = plan_training(QWEN3_8B, draft, H200, train, num_aux=3, num_devices_per_node=1, store=store)
    assert plan.tokens_per_second is not None


@pytest.mark.parametrize(
    ("strategy", "optim", "copies"),
    [
        (Strategy.ddp, OptimConfig(), 1 + 2),  # weights, two moments
        (Strategy.ddp, OptimConfig(kind=OptimKind.muon), 1 + 1),  # one momentum
        (Strategy.ddp, OptimConfig(ema_decay=0.999), 1 + 2 + 1),
        (Strategy.fsdp2, OptimConfig(), 1 + 1 / 4 + 2 / 4),  # whole weights for a step, quarters always
        (Strategy.fsdp2, OptimConfig(ema_decay=0.999), 1 + 1 / 4 + 2 / 4 + 1 / 4),
    ],
)
def test_strategy_and_optimizer_decide_how_often_a_weight_is_held(
    strategy: Strategy, optim: OptimConfig, copies: float
) -> None:
    plan = plan_training(
        QWEN3_8B,
        DraftConfig(name="eagle3"),
        HardwareConfig(name="h200x4", strategy=strategy),
        TrainerConfig(seq_len=8192),
        num_aux=3,
        num_devices_per_node=4,
        store=None,
        optim=optim,
    )
    held = sum(gib for part, gib in plan.memory_gib.items() if part.endswith("(fp32)"))
    assert held == pytest.approx(copies * plan.size.trainable * 4 / 2**30)


@pytest.mark.parametrize("dtype", StoreDtype)
def test_the_planned_bytes_are_those_that_the_store_estimates(dtype: StoreDtype) -> None:
    plan = extraction(ExtractorConfig(dtype=dtype))
    beside_states = 9  # an id and a mask
    assert plan.bytes_per_token == estimate_bytes(1, 4096, 3, dtype.value) + beside_states
    assert plan.disk_gb == pytest.approx(1000 * plan.bytes_per_token / 1e9)


@pytest.mark.parametrize("dtype", StoreDtype)
def test_the_plan_of_supervised_last_states_is_a_range(dtype: StoreDtype) -> None:
    """How much is supervised is known once the data are read: between nothing and everything."""
    some, all_of_them = (ExtractorConfig(dtype=dtype, last_state=kind) for kind in reversed(LastState))
    plan, whole = extraction(some), extraction(all_of_them)
    assert plan.min_bytes_per_token == estimate_bytes(1, 4096, 3, dtype.value, 0) + 9
    assert plan.bytes_per_token == whole.bytes_per_token == whole.min_bytes_per_token
    text = describe_extraction(plan, H200, some, {})
    assert f"{plan.min_bytes_per_token:,} to {plan.bytes_per_token:,} bytes per token, at most 0." in text
    assert f"  {whole.bytes_per_token:,} bytes per token, 0." in describe_extraction(
        whole, H200, all_of_them, {}
    )


def test_a_store_tells_the_plan_its_size_its_supervised_share_and_its_bytes(tmp_path: Path) -> None:
    assert StoreCounts.read(tmp_path) is None
    for damaged in (b"{", b"[]", b"{}", b"\xff\xfe", b"[" * 90_000, b'{"num_tokens": "x"}'):
        (tmp_path / "manifest.json").write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"manifest\.json is not the manifest of a store"):
            StoreCounts.read(tmp_path)
    manifest = {"num_tokens": 970_000, "num_supervised": 242_500, "dtype": "float8_e4m3"}
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    store = StoreCounts.read(tmp_path)
    assert store == StoreCounts(970_000, 0.25, StoreDtype.float8_e4m3)

    def plan(store: StoreCounts | None, step: TrainingStep) -> TrainPlan:
        draft, train = DraftConfig(name="eagle3", step=step), TrainerConfig(seq_len=8192, max_epochs=2)
        return plan_training(QWEN3_8B, draft, H200, train, num_aux=3, num_devices_per_node=1, store=store)

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
            QWEN3_8B,
            DraftConfig(name="eagle3"),
            H200,
            TrainerConfig(seq_len=8192, data_share=share),
            num_aux=3,
            num_devices_per_node=1,
            store=StoreCounts(97 * 8192, 0.5, StoreDtype.bfloat16),
        ).num_updates
        for share in (1.0, 0.25)
    ]
    assert updates == [100, 25]


def test_a_store_that_is_not_there_yet_bounds_a_plan_by_its_data() -> None:
    draft, train = DraftConfig(name="eagle3"), TrainerConfig(seq_len=8192, max_epochs=10)
    most = 97 * 8192
    plan = plan_training(
        QWEN3_8B, draft, H200, train, num_aux=3, num_devices_per_node=1, store=None, most_tokens=most
    )
    assert (plan.num_updates, plan.from_store) == (1000, False)


def test_gradients_are_held_twice_where_buckets_keep_them_and_summed_once_per_update() -> None:
    """DDP's buckets are always there; what a device adds up over micro-batches is too, and beside them."""
    draft = DraftConfig(name="eagle3")

    def plan(devices: int, per_update: int | None = None, **hardware: object) -> TrainPlan:
        return plan_training(
            QWEN3_8B,
            draft,
            replace(H200, **hardware),
            TrainerConfig(seq_len=8192, tokens_per_update=per_update),
            num_aux=3,
            num_devices_per_node=devices,
            store=None,
        )

    part = "gradients (fp32), at the peak"
    one, two, added_up = plan(1), plan(2, strategy=Strategy.ddp), plan(1, 2 * 8192)
    whole = one.size.trainable * 4 / 2**30
    assert one.memory_gib[part] < whole
    assert two.memory_gib[part] == pytest.approx(one.memory_gib[part] + whole)
    assert added_up.memory_gib[part] == pytest.approx(two.memory_gib[part])
    both = plan(2, 4 * 8192, strategy=Strategy.ddp)
    assert both.memory_gib[part] == pytest.approx(two.memory_gib[part] + whole)
    # 2 (n - 1) / n of the bytes over the link, once per update
    slow, rare = plan(2, link_gb_per_second=10.0), plan(2, 8 * 2 * 8192, link_gb_per_second=10.0)
    assert two.exchange_share == 0
    seconds = slow.tokens_per_update / slow.tokens_per_second - slow.tokens_per_update / two.tokens_per_second
    assert seconds == pytest.approx(one.size.trainable * 4 / 10e9)
    assert rare.exchange_share < slow.exchange_share / 4


def test_a_token_of_the_cache_is_its_keys_and_values_or_its_latent_vector_and_the_captured_states() -> None:
    captured = 4 * 4096 * 2
    assert extraction(ExtractorConfig()).cache_bytes_per_token == 36 * 2 * 8 * 128 * 2 + captured
    divided = extraction(ExtractorConfig(), engine=EngineConfig(tensor_parallel=4))
    # keys are divided, states whole on every device
    assert divided.cache_bytes_per_token == 36 * 2 * 2 * 128 * 2 + captured
    assert divided.memory_gib["weights"] == pytest.approx(8190735360 * 2 / 4 / 2**30)
    latent = replace(QWEN3_8B, kv_lora_rank=512, qk_rope_head_dim=64)
    assert extraction(ExtractorConfig(), latent).cache_bytes_per_token == 36 * 576 * 2 + captured
    rows = divided.sequences_that_fit
    assert rows * divided.cache_bytes_per_token * 2048 <= divided.cache_gib * 2**30
    assert (rows + 1) * divided.cache_bytes_per_token * 2048 > divided.cache_gib * 2**30
    assert extraction(ExtractorConfig(backend=Backend.hf)).sequences_that_fit is None
    given = extraction(ExtractorConfig(), engine=EngineConfig(cache_gib=3.0))
    assert given.cache_gib == pytest.approx(3.0)


def test_a_part_is_planned_for_its_share_of_the_tokens() -> None:
    part = extraction(ExtractorConfig(num_parts=3, part=1))
    assert part.num_tokens == 334
    text = describe_extraction(part, H200, ExtractorConfig(num_parts=3, part=1), {})
    assert "part 1 of 3, at most 334" in text


def test_the_plan_knows_what_a_capture_keeps_under_way() -> None:
    assert (plan_extraction_module.REQUEST_BYTES, plan_extraction_module.CALLS_PER_RUNNER) == (
        capture.REQUEST_BYTES,
        vllm_engine.CALLS_PER_RUNNER,
    )
    assert plan_extraction_module.SCRATCH_SHARE == vllm_files.FILL_SHARE
    assert plan_memory.TARGET_BYTES == heads.TARGET_BYTES
    plan = extraction(ExtractorConfig(shard_tokens=16384))
    assert plan.in_flight_gb == pytest.approx(6 * 16384 * 4 * 4096 * 2 / 1e9)  # a shard is above 512 MiB
