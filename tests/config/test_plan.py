"""Plans against what was measured or counted independently."""

from __future__ import annotations

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.plan import draft_size, plan_extraction, plan_training
from eagle3lab.config.plan_text import describe_training, require_fit
from eagle3lab.config.schema import DraftConfig, HardwareConfig, Precision, Shapes, StoreDtype, TrainerConfig
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
        DraftConfig(name="eagle3", ttt_steps=ttt_steps),
        QWEN3_8B,
        H200,
        TrainerConfig(seq_len=8192),
        num_aux=3,
        num_devices_per_node=1,
        store_tokens=None,
    )
    assert plan.total_gib == pytest.approx(gib, rel=0.15)
    assert plan.tokens_per_second == pytest.approx(tokens_per_second, rel=0.1)


def test_a_plan_that_cannot_fit_is_refused_with_what_would() -> None:
    hardware = HardwareConfig(name="small", precision=Precision.bf16, device_memory_gib=12)
    plan = plan_training(
        DraftConfig(name="eagle3", ttt_steps=7),
        QWEN3_8B,
        hardware,
        TrainerConfig(seq_len=8192),
        num_aux=3,
        num_devices_per_node=1,
        store_tokens=None,
    )
    with pytest.raises(UserError, match=r"does not fit small(.|\n)*train\.seq_len at \d+%"):
        require_fit(plan, hardware)
    assert "memory per device" in describe_training(plan, hardware, {})


@pytest.mark.parametrize("dtype", StoreDtype)
def test_the_planned_bytes_are_those_that_the_store_estimates(dtype: StoreDtype) -> None:
    plan = plan_extraction(
        QWEN3_8B, H200, num_layer_ids=3, num_devices_per_node=1, num_tokens=1000, dtype=dtype
    )
    beside_states = 9  # an id and a mask
    assert plan.bytes_per_token == estimate_bytes(1, 4096, 3, dtype.value) + beside_states
    assert plan.disk_gb == pytest.approx(1000 * plan.bytes_per_token / 1e9)
