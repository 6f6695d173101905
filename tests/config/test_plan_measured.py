"""Plans against every H200 run that `benchmarks/results/` holds: memory within 15 %, tokens/s within 25 %."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.plan_extraction import plan_extraction
from eagle3lab.config.plan_sizes import StoreCounts
from eagle3lab.config.plan_training import plan_training
from eagle3lab.config.schema import (
    DraftConfig,
    ExtractorConfig,
    HardwareConfig,
    Shapes,
    StoreDtype,
    Strategy,
    TrainerConfig,
    TrainingStep,
)

from .option_files import typed

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
# of `benchmarks/step_models.py`: widths, pack and documents; only the layers' number and all weights do not matter
QWEN3_8B = Shapes(4096, 12288, 36, 32, 8, 128, 151936, 8_000_000_000)
WIDE = Shapes(7168, 18432, 36, 64, 64, 128, 163840, 8_000_000_000)
STEPS = {"reference": TrainingStep.reference, "ours": TrainingStep.pruned}
HEAD = "verifier's whole head, for validation"  # `train.py` holds it, the bare step does not


@dataclass(frozen=True)
class Measured:
    """One run: what it was, and what it took."""

    name: str
    shapes: Shapes
    seq_len: int
    step: TrainingStep
    ttt_steps: int
    supervised_share: float
    gib: float
    tokens_per_second: float
    whole_head: bool = False
    hardware: str = "h200"
    num_devices: int = 1
    strategy: Strategy = Strategy.auto
    accumulate: int = 1


def _file(name: str) -> dict[str, Any]:
    return dict(json.loads((RESULTS / f"{name}.json").read_text()))


def _bare_steps(name: str) -> Iterator[Measured]:
    for row in _file(name)["rows"]:
        share, k = row["supervised_share"], row["ttt_steps"]
        for side, step in STEPS.items():
            figures = row.get(side) or {"gib": row[f"{side}_gib"], "tok_s": row[f"{side}_tok_s"]}
            yield Measured(
                f"{name}: {side}, share {share}, K={k}",
                QWEN3_8B,
                8192,
                step,
                k,
                share,
                figures["gib"],
                figures["tok_s"],
            )


def _measured() -> Iterator[Measured]:
    yield from _bare_steps("train_step_h200")
    yield from _bare_steps("specforge_h200")
    for side, figures in _file("wide_h200")["notes"]["wide"].items():
        yield Measured(
            f"hidden 7168: {side}", WIDE, 4096, STEPS[side], 3, 0.5, figures["gib"], figures["tok_s"]
        )
    results = _file("end_to_end_h200")
    for row in results["rows"]:
        run = results["notes"][f"k{row['ttt_steps']}_{row['storage']}"]
        yield Measured(
            f"train.py, {row['storage']}",
            QWEN3_8B,
            8192,
            TrainingStep(results["notes"]["step"]),
            row["ttt_steps"],
            0.5,
            run["peak_memory_gib"],
            row["train_tok_s"],
            True,
        )


def _several_devices() -> Iterator[Measured]:
    """Of `benchmarks/scaling.py`: one device with all packs of an update, then several that share them."""
    for file in sorted(RESULTS.glob("scaling*_h200x*.json")):
        results = _file(file.stem)
        k, packs = results["notes"]["ttt_steps"], results["notes"]["packs"]
        for row in results["rows"]:
            shapes, devices = {4096: QWEN3_8B, 7168: WIDE}[row["hidden"]], row["devices"]
            for side, num_devices, strategy in (
                ("one", 1, Strategy.auto),
                ("each", devices, Strategy(row["strategy"])),
            ):
                yield Measured(
                    f"{side} of {devices} by {row['strategy']}, hidden {row['hidden']}",
                    shapes,
                    row["seq_len"],
                    TrainingStep.pruned,
                    k,
                    0.5,
                    row[f"{side}_gib"],
                    row["one_tok_s" if side == "one" else "all_tok_s"],
                    whole_head=True,
                    hardware="h200" if side == "one" else "h200x2",
                    num_devices=num_devices,
                    strategy=strategy,
                    accumulate=packs // num_devices,
                )


RUNS = [*_measured(), *_several_devices()]


@pytest.fixture(scope="module")
def hardware_of() -> Callable[[str], HardwareConfig]:
    return lru_cache(lambda name: typed("train", [f"hardware={name}"]).hardware)


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_training_plan_agrees_with_the_run(
    run: Measured, hardware_of: Callable[[str], HardwareConfig]
) -> None:
    devices = run.num_devices
    hardware = replace(hardware_of(run.hardware), strategy=run.strategy, num_devices=devices)
    plan = plan_training(
        run.shapes,
        DraftConfig(name="eagle3", ttt_steps=run.ttt_steps, step=run.step),
        hardware,
        TrainerConfig(seq_len=run.seq_len, tokens_per_update=run.seq_len * devices * run.accumulate),
        num_aux=3,
        num_devices_per_node=devices,
        store=StoreCounts(1_000_000, run.supervised_share, StoreDtype.bfloat16),
    )
    gib = plan.total_gib - (0 if run.whole_head else plan.memory_gib[HEAD])
    print(f"{run.name}: {gib:.2f} GiB planned, {run.gib:.2f} measured; ", end="")
    print(f"{plan.tokens_per_second:,.0f} tokens/s planned, {run.tokens_per_second:,.0f} measured")
    assert gib == pytest.approx(run.gib, rel=0.15)
    assert plan.tokens_per_second == pytest.approx(run.tokens_per_second, rel=0.25)


def test_the_runs_cover_both_steps_both_hidden_sizes_and_the_whole_command() -> None:
    assert {(run.step, run.shapes.hidden_size) for run in RUNS} == {
        (step, hidden) for step in TrainingStep for hidden in (4096, 7168)
    }
    assert {run.ttt_steps for run in RUNS} == {3, 7}
    assert any(run.whole_head for run in RUNS)


def test_an_extraction_plan_agrees_with_the_run(hardware_of: Callable[[str], HardwareConfig]) -> None:
    results = _file("extract_h200")
    notes = results["notes"]
    for row, run in zip(results["rows"], notes["rounds"], strict=True):
        plan = plan_extraction(
            Shapes(**notes["shapes"]),
            hardware_of("h200"),
            ExtractorConfig(batch_tokens=notes["batch_tokens"], dtype=StoreDtype(row["storage"])),
            num_layer_ids=3,
            num_tokens=run["tokens"],
            max_len=notes["length"],
        )
        print(
            f"extraction: {plan.tokens_per_second:,.0f} tokens/s planned, {row['extract_tok_s']:,} measured"
        )
        assert plan.tokens_per_second == pytest.approx(row["extract_tok_s"], rel=0.25)
        assert plan.write_gb_per_second == pytest.approx(row["gb_s"], rel=0.25)
        assert plan.disk_gb == pytest.approx(run["bytes"] / 1e9, rel=0.01)
        assert plan.fits


def test_the_founding_run_is_planned_at_the_speed_it_had() -> None:
    """2,280 tokens/s with tensor parallelism over eight RTX PRO 6000."""
    cfg = typed("extract", ["experiment=kimi_k25_blackwell8"])
    plan = plan_extraction(
        cfg.model.shapes,
        cfg.hardware,
        cfg.extract,
        num_layer_ids=3,
        num_tokens=cfg.data.max_tokens,
        max_len=cfg.data.max_len,
    )
    assert plan.fits
    assert plan.tokens_per_second == pytest.approx(2280, rel=0.1)
    assert replace(cfg.hardware, assumed_mfu=0.4) == typed("train", ["hardware=blackwell8"]).hardware
