"""What a run logs, validates, measures and refuses."""

from __future__ import annotations

import csv
import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import OptimConfig, Precision, Schedule, TrainerConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.store.reader import StoreReader
from eagle3lab.training import module as training_module
from eagle3lab.training.console import clock_text, short
from eagle3lab.training.metrics import metric_names
from eagle3lab.training.replicas import micro_batches_per_update, num_replicas
from eagle3lab.training.trainer import fit
from eagle3lab.verifier.weights import final_norm


def csv_rows(path: Path) -> list[dict[str, str]]:
    with (path / "metrics.csv").open(newline="") as f:
        return list(csv.DictReader(f))


def test_a_run_logs_every_interval_and_validation_once(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = TrainerConfig(
        seq_len=tiny.SEQ_LEN, max_epochs=None, max_updates=10, log_every_updates=4, validate_every_updates=5
    )
    module, summary = train_run(store, tmp_path, train)
    rows = csv_rows(tmp_path)
    assert list(rows[0]) == metric_names(tiny.TTT_STEPS)
    trained = [int(row["update"]) for row in rows if row["train/loss"]]
    validated = [int(row["update"]) for row in rows if row["val/loss"]]
    assert trained == [4, 5, 8, 10]
    assert validated == [0, 5, 10]  # the untrained draft first
    assert int(rows[-1]["tokens"]) == module.plan.num_tokens == summary.tokens
    assert all(0 <= float(v) <= 1 for row in rows for k, v in row.items() if v and "accuracy" in k)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 7
    assert "update 4/10  tokens" in printed.out
    assert printed.err == ""
    content = json.loads(json.dumps(summary.to_json(), allow_nan=False))
    assert content["updates"] == 10
    assert content["best_validation"]["val/simulated_acceptance_length"] >= 1
    assert 0 <= content["data_wait_share"] <= 1
    assert 0 < content["train_seconds"] <= content["seconds"]


def test_by_default_validation_comes_at_every_epochs_end_and_at_the_runs(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=None, max_updates=19, log_every_updates=100)
    module, _ = train_run(store, tmp_path, train)
    epochs = [u + 1 for u in range(19) if module.plan.ends_epoch(u)]
    assert len(epochs) == 2
    assert [int(row["update"]) for row in csv_rows(tmp_path) if row["val/loss"]] == [0, *epochs, 19]


def test_validation_is_over_every_validation_row_and_the_full_vocabulary(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    """Accuracy and coverage by hand, one row at a time, from the draft's own tokens."""
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=1)
    module, summary = train_run(store, tmp_path, train)
    edge, data = tiny.edge_weights(), tiny.build(store, train)[1].validation_data
    right, starts, covered, prefix = [0, 0, 0], 0, 0, [0, 0, 0]
    for i in range(len(data)):
        batch = create_collate_fn(int(data[i]["lengths"]))([data[i]])
        inputs = {
            k: v for k, v in batch.items() if k not in ("lengths", "row_index", "verifier_last_hidden_states")
        }
        with torch.no_grad():
            guesses = [tiny.VOCABULARY.to_verifier(g[0]) for g in module.draft(**inputs, ttt_steps=3)]
        last = batch["verifier_last_hidden_states"][0]
        target = linear(final_norm(last, edge.norm, tiny.FACTS.rms_norm_eps), edge.head).argmax(-1)
        mask = batch["loss_mask"][0]
        for j in range(len(target)):
            if mask[j]:
                starts += 1
                covered += int(target[j] % 2 == 0)
            alive = bool(mask[j])
            for k in range(3):
                hit = j + k < len(target) and bool(mask[j + k]) and bool(guesses[k][j] == target[j + k])
                right[k] += hit
                alive = alive and hit
                prefix[k] += alive
    totals = [int(sum(int(data[i]["loss_mask"][k:].sum()) for i in range(len(data)))) for k in range(3)]
    got = summary.last_validation
    assert [got[f"val/accuracy_step{k}"] for k in range(3)] == pytest.approx(
        [r / n for r, n in zip(right, totals, strict=True)]
    )
    assert got["val/coverage"] == pytest.approx(covered / starts)
    assert got["val/simulated_acceptance_length"] == pytest.approx(1 + sum(prefix) / starts)


def test_training_learns(tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, tokens_per_update=64, max_epochs=15, log_every_updates=4)
    _, summary = train_run(store, tmp_path, train)
    first = float(csv_rows(tmp_path)[1]["train/loss"])
    assert summary.last["train/loss"] < 0.2 * first


def test_the_rate_logged_is_the_updates_own(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=None, max_updates=10, log_every_updates=1)
    optim = OptimConfig(lr=1e-3, schedule=Schedule.linear, lr_warmup_updates=4)
    train_run(store, tmp_path, train, optim=optim)
    rates = [float(row["train/learning_rate"]) for row in csv_rows(tmp_path) if row["train/loss"]]
    expected = [0.0, 0.00025, 0.0005, 0.00075, 0.001, 0.00083333, 0.00066667, 0.0005, 0.00033333, 0.00016667]
    assert rates == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_checkpoint_before(
    tiny: ModuleType, store: StoreReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=9, log_every_updates=3, save_every_updates=3)
    module, data = tiny.build(store, train)
    original = training_module.ttt_forward

    def spoilt(*args: Any, **kwargs: Any) -> Any:
        output = original(*args, **kwargs)
        return replace(output, loss_sums=output.loss_sums * (value if module.num_updates == 4 else 1.0))

    monkeypatch.setattr(training_module, "ttt_forward", spoilt)
    with pytest.raises(UserError, match="between updates 3 and 5"):
        fit(module, data, hardware=tiny.hardware(), train=train, run_dir=tmp_path)
    kept = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    assert kept["eagle3lab"]["num_updates"] == 3
    assert all(bool(t.isfinite().all()) for t in kept["state_dict"].values() if t.is_floating_point())


def test_bf16_keeps_fp32_masters_and_moves_the_norms(
    tiny: ModuleType, store: StoreReader, tmp_path: Path
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=None, max_updates=30, validate_every_updates=30)
    module, data = tiny.build(store, train, optim=OptimConfig(lr=1e-4, schedule=Schedule.constant))
    module.compute_dtype = None
    hardware = replace(tiny.hardware(), precision=Precision.bf16)
    fit(module, data, hardware=hardware, train=train, run_dir=tmp_path)
    norms = {n: w for n, w in tiny.weights(module).items() if w.ndim == 1}
    assert len(norms) == 4
    assert all(bool((w != 1.0).all()) for w in norms.values())
    checkpoint = torch.load(tmp_path / "checkpoints" / "last.ckpt", weights_only=True)
    state = checkpoint["optimizer_states"][0]["state"][0]
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32


def test_a_store_without_training_rows_is_an_error(tiny: ModuleType, tmp_path: Path) -> None:
    store = tiny.write_store(tmp_path / "store", tiny.default_rows(0, 3))
    with pytest.raises(UserError, match="no training rows"):
        tiny.build(store, TrainerConfig(seq_len=tiny.SEQ_LEN))


def test_more_devices_than_packs_is_an_error(tiny: ModuleType, tmp_path: Path) -> None:
    store = tiny.write_store(tmp_path / "store", tiny.default_rows(1, 1))
    with pytest.raises(UserError, match="1 packs for 2 devices"):
        tiny.build(store, TrainerConfig(seq_len=tiny.SEQ_LEN), devices=2)


@pytest.mark.parametrize(("tokens", "fix"), [(100, "=64 or train.tokens_per_update=128"), (30, "=64")])
def test_tokens_that_are_no_whole_packs_propose_values(tokens: int, fix: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"train.tokens_per_update{fix}")):
        micro_batches_per_update(TrainerConfig(seq_len=32, tokens_per_update=tokens), 2)
    assert micro_batches_per_update(TrainerConfig(seq_len=32, tokens_per_update=128), 2) == 2
    assert micro_batches_per_update(TrainerConfig(seq_len=32), 2) == 1


def test_torchrun_with_another_number_of_processes_is_an_error(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"hardware\.num_devices=2"):
        num_replicas(tiny.hardware(1))
    assert num_replicas(tiny.hardware(2)) == 2


@pytest.mark.parametrize(
    ("variables", "fix"),
    [
        ({"LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}, "hardware.num_nodes=2"),
        ({"SLURM_NTASKS_PER_NODE": "8", "SLURM_NTASKS": "16"}, "hardware.num_devices=8"),
        ({"SLURM_NTASKS": "6"}, "hardware.num_nodes=3"),
        ({"SLURM_NTASKS": "1"}, "2 processes on every node"),
        ({"WORLD_SIZE": "3", "RANK": "1"}, "unset WORLD_SIZE RANK"),  # it would train and write nothing
    ],
)
def test_a_launcher_with_another_number_of_processes_is_an_error(
    tiny: ModuleType, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], fix: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=re.escape(fix)):
        num_replicas(tiny.hardware(2))
    monkeypatch.setenv("SLURM_JOB_NAME", "interactive")
    if "WORLD_SIZE" not in variables:
        assert num_replicas(tiny.hardware(2)) == 2  # a shell inside a job starts ranks itself


def test_short_numbers_and_times() -> None:
    assert [short(n) for n in (7, 999, 1234567, 25300, 999600)] == ["7", "999", "1.23M", "25.3k", "1000k"]
    assert clock_text(3725) == "1:02:05"
