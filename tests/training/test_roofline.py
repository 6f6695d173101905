"""Speed figures against sums by hand, and the word for what held a run back."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from eagle3lab.config.flops import flops_counter
from eagle3lab.config.schema import DraftConfig, Shapes, TrainerConfig, TrainingStep
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.console import interval_line
from eagle3lab.training.roofline import Speedometer, Stretch, find_limit
from eagle3lab.training.trainer import fit
from eagle3lab.training.work import work_counter

STEADY = Stretch(
    seconds=10.0,
    updates=100,
    packs=100,
    tokens=800_000,
    supervised=400_000.0,
    wait_seconds=0.1,
    bytes_read=20 * 10**9,
    needed_flops=6e15,
)


def limit(stretch: Stretch = STEADY, **changes: Any) -> str:
    given = {
        "first_seconds": 2.0,
        "pause_seconds": 1.0,
        "peak_tflops": 1000.0,
        "peak_memory_gib": 40.0,
        "device_memory_gib": 140.0,
    }
    return str(find_limit(stretch, **(given | changes)))


def stretch(**changes: Any) -> Stretch:
    return Stretch(**(STEADY.__dict__ | changes))


def test_the_figures_of_a_stretch_are_its_sums_over_its_seconds() -> None:
    assert STEADY.figures(num_replicas=2, peak_tflops=1000.0) == pytest.approx(
        {
            "speed/tokens_per_second": 80_000.0,
            "speed/supervised_tokens_per_second": 40_000.0,
            "speed/mfu": 0.6,
            "speed/needed_tflops_per_device": 600.0,
            "speed/data_wait_share": 0.01,
            "speed/read_gb_per_second": 4.0,
        }
    )


def test_without_a_peak_there_is_no_mfu_and_without_work_no_flops() -> None:
    assert "speed/mfu" not in STEADY.figures(1, None)
    assert STEADY.figures(1, None)["speed/needed_tflops_per_device"] == 600.0
    assert stretch(needed_flops=0.0).figures(1, 1000.0).keys() == STEADY.figures(1, None).keys() - {
        "speed/needed_tflops_per_device"
    }


def test_steady_speed_leaves_out_the_interval_that_compiles() -> None:
    speed = Speedometer(1, 100.0, lambda work: 1e12 * work)
    loader: Any = SimpleNamespace(packs=0, wait_seconds=0.0, bytes_read=0, work=None)

    def interval(seconds: float, packs: int) -> dict[str, float]:
        loader.packs, loader.work = loader.packs + packs, (loader.work or 0) + packs
        loader.wait_seconds, loader.bytes_read = loader.wait_seconds + 0.5, loader.bytes_read + 10**9
        return speed.interval(Stretch(seconds, updates=1, tokens=10, supervised=5.0), loader)

    interval(60.0, 10)
    assert speed.steady.seconds == 60.0  # a run of one interval has nothing else
    assert interval(2.0, 20)["speed/mfu"] == pytest.approx(0.1)
    interval(3.0, 30)
    assert speed.steady == Stretch(
        5.0,
        updates=2,
        packs=50,
        tokens=20,
        supervised=10.0,
        wait_seconds=1.0,
        bytes_read=2 * 10**9,
        needed_flops=50e12,
    )


def test_each_limit_is_named_with_the_figures_that_say_so() -> None:
    assert limit() == "compute: MFU 60% of 1000 TFLOP/s"
    assert limit(first_seconds=20.0).startswith("start-up: 20.0 of 31.0 s")
    assert limit(pause_seconds=30.0).startswith("validation: 30.0 of 42.0 s")
    assert limit(stretch(wait_seconds=1.0)).startswith("data: 10.0% of the time")
    slow = stretch(needed_flops=1e15)  # 10 ms of work in a pack
    assert limit(slow).startswith("compute: MFU 10%")
    assert limit(slow, peak_memory_gib=130.0).startswith("memory: 130.0 of 140.0 GiB")
    assert limit(stretch(needed_flops=2e14)).startswith("too-small updates: a pack needs 2.00 ms")
    assert limit(peak_tflops=None).startswith("compute: nothing else took time (MFU n/a")


def test_the_line_of_an_interval_shows_every_figure() -> None:
    figures = STEADY.figures(1, 1000.0) | {
        "update": 100,
        "tokens": 8e5,
        "train/loss": 1.5,
        "speed/peak_memory_gib": 17.24,
    }
    line = interval_line(figures, 200, 1_600_000, None)
    shown = "80k tok/s (40k supervised)  MFU 60.0 %  data wait 1 %  read 2GB/s  17.2 GiB  ETA 0:00:10"
    assert line.endswith(shown)
    del figures["speed/mfu"]
    assert "MFU n/a" in interval_line(figures, 200, 1_600_000, None)


def test_a_run_logs_and_sums_up_the_work_its_rows_need(
    tiny: ModuleType, store: StoreReader, tmp_path: Path
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=2, log_every_updates=4)
    module, data = tiny.build(store, train)
    draft = DraftConfig(
        name="test", ttt_steps=tiny.TTT_STEPS, vocab_size=tiny.VOCAB // 2, step=TrainingStep.reference
    )
    data.count_work = work_counter(draft)
    shapes = Shapes(tiny.HIDDEN, 96, 8, 4, 2, 16, tiny.VOCAB, 10**6)
    hardware = tiny.hardware()
    hardware.peak_tflops = 2.0
    count = flops_counter(draft, shapes, len(tiny.AUX_IDS))
    summary = fit(
        module, data, hardware=hardware, train=train, run_dir=tmp_path, needed_flops=count, loggers=()
    )
    # by hand: unpruned, so every real position costs the same but for its attention
    h, q, kv, vocab, ffn, steps = 64, 64, 32, 64, 96, 3
    layer = 2 * h * (q + 2 * kv) + q * h + 3 * h * ffn
    per_token = 4 * 3 * h * h + steps * 6 * layer + (4 * steps + 2) * h * vocab
    pairs = sum(n * (n + 1) // 2 for n in data.train_data.lengths)
    tokens = sum(data.train_data.lengths)
    epoch = per_token * tokens + 12 * q * (steps * pairs + (0 + 1 + 2) * tokens)
    assert data.train_loader is not None
    assert count(data.train_loader.work) == pytest.approx(2 * epoch)

    with (tmp_path / "metrics.csv").open(newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["train/loss"]]
    for row in rows:
        flops = float(row["speed/needed_tflops_per_device"])
        assert float(row["speed/mfu"]) == pytest.approx(flops / 2.0)
        assert float(row["speed/read_gb_per_second"]) == pytest.approx(
            float(row["speed/tokens_per_second"]) * 4 * h * 4 / 1e9
        )
    content = json.loads(json.dumps(summary.to_json()))
    assert content["mfu"] == pytest.approx(content["needed_tflops_per_device"] / 2.0)
    assert 0 < content["first_update_seconds"] < content["seconds"]
    assert content["limit"].startswith(content["limited_by"] + ": ")
