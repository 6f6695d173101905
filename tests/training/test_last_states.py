"""Training from a store of supervised last states: to the bit that from a store of all of them."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3lab.config.schema import LossConfig, Supervision, TrainerConfig, TrainingStep
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.rows.rows import Row
from eagle3lab.store.identity import row_id_of
from eagle3lab.training.loader import state_bytes

FIGURES = ("train/loss", "val/", "train/grad_norm", "train/accuracy")


def several_answers(tiny: ModuleType, num_train: int = 10, num_validation: int = 4) -> list[Row]:
    """Rows of two answers, and one that is supervised up to its last token; short, so that packs have borders."""
    rng = random.Random(3)
    rows = []
    for i in range(num_train + num_validation):
        length = rng.randrange(8, 20)
        ids = tuple(rng.randrange(tiny.VOCAB) for _ in range(length))
        a, b = sorted(rng.sample(range(1, length), 2))
        mask = [int(a // 2 <= p < a or p >= b) if i % 2 else int(a <= p < b) for p in range(length)]
        split = "train" if i < num_train else "validation"
        rows.append(Row(row_id_of(ids, mask), f"c{i}", f"rows:{i}", split, ids, tuple(mask)))
    return rows


@pytest.fixture(scope="module")
def stores(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Any]:
    root, rows = tmp_path_factory.mktemp("stores"), several_answers(tiny)
    return {
        (dtype, kept): tiny.write_store(root / f"{dtype}-{kept}", rows, dtype, kept)
        for dtype in ("bfloat16", "float8_e4m3")
        for kept in ("all", "supervised")
    }


@pytest.mark.parametrize("step", list(TrainingStep))
@pytest.mark.parametrize("rule", list(Supervision))
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_losses_weights_and_validation_are_the_same_to_the_bit(
    tiny: ModuleType,
    stores: dict[tuple[str, str], Any],
    tmp_path: Path,
    train_run: Any,
    dtype: str,
    rule: Supervision,
    step: TrainingStep,
) -> None:
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=None, max_updates=4, log_every_updates=1)
    loss = LossConfig(step_decay=0.8, supervision=rule)
    modules, lines = [], []
    for kept in ("all", "supervised"):
        store = stores[dtype, kept]
        module, summary = train_run(store, tmp_path / kept, train, step=step, loss=loss, noise=0.05)
        modules.append(tiny.weights(module))
        figures = {k: v for k, v in summary.last.items() if k.startswith(FIGURES)}
        lines.append((figures, summary.last_validation, _losses(tmp_path / kept)))
    assert lines[0] == lines[1]
    assert any("val/simulated_acceptance_length" in part for part in lines[0][:2])
    start = tiny.weights(tiny.build(stores[dtype, "all"], train, loss=loss)[0])
    for name, weight in modules[0].items():
        assert torch.equal(modules[1][name], weight), name
    assert any(not torch.equal(start[name], weight) for name, weight in modules[0].items())


def _losses(run_dir: Path) -> list[str]:
    import csv

    with (run_dir / "metrics.csv").open(newline="") as file:
        return [row["train/loss"] for row in csv.DictReader(file)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3"])
def test_the_bytes_read_are_those_in_the_store(
    tiny: ModuleType, stores: dict[tuple[str, str], Any], dtype: str
) -> None:
    per_state = tiny.HIDDEN * 2 if dtype == "bfloat16" else tiny.HIDDEN + 4
    for kept in ("all", "supervised"):
        data = Eagle3SampleFileDataset(stores[dtype, kept], raw=True)
        batch = create_collate_fn(64)([data[0], data[1]])
        masks = [data[i]["loss_mask"] for i in (0, 1)]
        tokens = num_last = sum(map(len, masks))
        if kept == "supervised":
            num_last = sum(len(data[i]["verifier_last_hidden_states"]) for i in (0, 1))
            assert num_last < tokens
        assert state_bytes(batch) == (len(tiny.AUX_IDS) * tokens + num_last) * per_state
