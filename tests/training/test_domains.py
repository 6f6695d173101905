"""Validation by domain: figures of each file's rows, exact, and nothing more where there is one file."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from eagle3lab.config.schema import TrainerConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.draft.ttt import ttt_forward
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.metrics import domain_figures
from eagle3lab.training.validation import pack_sums
from eagle3lab.verifier.weights import EdgeWeights


@pytest.fixture(scope="module")
def two_files(tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> StoreReader:
    """Seven validation rows: of every third one the file is another; all training rows are of one."""
    rows = [
        replace(
            row, source=f"/data/{'code' if row.split == 'validation' and i % 3 == 0 else 'chat'}.jsonl:{i}"
        )
        for i, row in enumerate(tiny.default_rows(12, 7))
    ]
    return tiny.write_store(tmp_path_factory.mktemp("domains") / "store", rows)


def test_figures_of_a_domain_are_those_of_its_rows_alone(
    tiny: ModuleType, two_files: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    """Against every row by itself, in a pack of its own."""
    train = TrainerConfig(seq_len=tiny.SEQ_LEN, max_epochs=2)
    module, summary = train_run(two_files, tmp_path, train)
    data = tiny.build(two_files, train)[1]
    edge = EdgeWeights(None, module.verifier_head, module.verifier_norm)
    totals: dict[str, dict[str, torch.Tensor]] = {}
    for i, row in enumerate(two_files.indices("validation")):
        batch = create_collate_fn(tiny.SEQ_LEN)([data.validation_data[i]])
        with torch.no_grad():
            output = ttt_forward(module.draft, batch, tiny.TTT_STEPS, module.recorder)
            sums = pack_sums(output, batch, tiny.VOCABULARY, module.t2d, edge, tiny.FACTS.rms_norm_eps)
        own = totals.setdefault("code" if "code" in two_files.rows[row].source else "chat", {})
        for name, value in sums.items():
            own[name] = own.get(name, 0) + value.double()
    got = summary.last_validation
    for domain, own in totals.items():
        starts = float(own["totals"][0])
        loss = sum(0.8**k * own["loss_step"][k] / own["totals"][k] for k in range(tiny.TTT_STEPS))
        length = 1 + float(own["prefix_correct"].sum()) / starts
        assert got[f"val/{domain}/simulated_acceptance_length"] == pytest.approx(length, abs=1e-12)
        assert got[f"val/{domain}/loss"] == pytest.approx(float(loss), rel=1e-6)
        for k in range(tiny.TTT_STEPS):
            accuracy = float(own["correct"][k] / own["totals"][k])
            assert got[f"val/{domain}/accuracy_step{k}"] == pytest.approx(accuracy, abs=1e-12)
    starts = {domain: float(own["totals"][0]) for domain, own in totals.items()}
    together = sum(
        n * (got[f"val/{domain}/simulated_acceptance_length"] - 1) for domain, n in starts.items()
    ) / sum(starts.values())
    assert got["val/simulated_acceptance_length"] == pytest.approx(1 + together)
    assert len({got[f"val/{domain}/simulated_acceptance_length"] for domain in starts}) == 2


def test_every_domain_has_columns_and_a_line(
    tiny: ModuleType,
    two_files: StoreReader,
    train_run: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    train_run(two_files, tmp_path, TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=1))
    with (tmp_path / "metrics.csv").open(newline="") as f:
        rows = [row for row in csv.DictReader(f) if row["val/loss"]]
    assert all(row[f"val/{domain}/loss"] for row in rows for domain in ("chat", "code"))
    assert "\n  chat  loss " in capsys.readouterr().out


def test_one_domain_is_not_told_apart(
    tiny: ModuleType, store: StoreReader, train_run: Any, tmp_path: Path
) -> None:
    _, summary = train_run(store, tmp_path, TrainerConfig(seq_len=tiny.SEQ_LEN, max_updates=1))
    assert not [name for name in summary.last_validation if name.count("/") > 1]


def test_a_domain_without_a_supervised_token_has_no_figures() -> None:
    names = ("loss_step", "correct", "prefix_correct", "totals")
    nothing = {name: [0.0] for name in names} | {"covered": [0.0]}
    some = {name: [2.0] for name in names} | {"covered": [1.0]}
    figures = domain_figures(("a", "b"), [nothing, some], 1.0)
    assert figures == {
        "val/b/simulated_acceptance_length": 2.0,
        "val/b/loss": 1.0,
        "val/b/accuracy_step0": 1.0,
    }
