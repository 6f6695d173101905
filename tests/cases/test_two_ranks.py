"""PAR-02 and PAR-04 on two real ranks, and what a stop and a resume on one rank do with the same rows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from case_run import Run, config, expected, logged, weights, write_store

from eagle3lab.data import PackBatchSampler
from eagle3lab.store.reader import StoreReader

SCRIPT = Path(__file__).with_name("two_ranks.py")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def ranks(
    extract_command: Callable[..., Any], tmp_path: Path
) -> tuple[list[dict[str, Any]], StoreReader, int]:
    """What both ranks found on PAR-02's own rows, trained on and validated; the store; the pack length."""
    case = expected("PAR-02")
    reader = extract_command("PAR-02", "data.validation_share=0").reader
    rows = []
    for i in range(len(reader)):
        row = reader.read(i)
        length = len(row["input_ids"])
        states = torch.cat([row["aux_hidden_states"], row["verifier_last_hidden_states"]], dim=1)
        rows.append((row["input_ids"], row["loss_mask"], states.reshape(length, 4, -1)))
    assert len(rows) == case["rows"]
    store = write_store(tmp_path / "both", rows, rows)
    lengths = [len(row[0]) - 1 for row in rows]
    # seven rows of very different length make three packs: in each epoch a rank has one without a partner
    seq_len = sum(lengths) * 2 // 5
    assert {len(PackBatchSampler(lengths, seq_len, shuffle=s).plan(0)) for s in (True, False)} == {3}
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(case["ranks"])]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, *words, str(SCRIPT), str(store.path), str(tmp_path), str(seq_len)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=2 * case["time_limit_s"],  # a machine may be busy; a hang would be for ever
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    print(f"two ranks: {time.monotonic() - began:.0f} s")
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(case["ranks"])]
    return found, store, seq_len


def test_par_02_par_04_uneven_ranks_end_and_every_row_counts_once(
    ranks: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, store, seq_len = ranks
    for stage in ("training", "validation"):
        each = [rank["batches"][stage] for rank in found]
        assert len(each[0]) == len(each[1])
        seen = [row for batches in each for batch in batches for row in batch]
        # two epochs, and a validation after each
        assert sorted(row for row in seen if row >= 0) == sorted([*range(7), *range(7)])
        assert seen.count(-1) == 2

    case = expected("PAR-04")
    for rank in found:
        for reduced in rank["reduced"]:
            for name in ("correct", "also_correct"):
                assert reduced[name][0] / reduced["total"][0] == pytest.approx(case["right"])
    assert [rank["own"] for rank in found] == [[[7.0], [10.0]], [[3.0], [4.0]]]

    # one rank with the same packs per update: the same loss, the same mean over exactly 7 rows
    train = config(seq_len=seq_len, tokens_per_update=2 * seq_len, max_epochs=2)
    module, summary = Run(store)(tmp_path / "one", train, noise=0.05)
    assert found[0]["validation"] == pytest.approx(summary.last_validation, rel=1e-5)
    assert logged(tmp_path / "two", "train/loss") == pytest.approx(
        logged(tmp_path / "one", "train/loss"), rel=1e-5
    )
    two = torch.load(tmp_path / "weights.pt", weights_only=True)
    one = weights(module)
    assert max(float((one[name] - two[name]).abs().max()) for name in one) < 2e-5

    # both stopped at the same update, and one rank goes on with the same rows
    assert "stopped by a signal to another process of the run after update 2 of" in found[0]["stopped"]
    assert "stopped by SIGTERM after update 2 of" in found[1]["stopped"]
    capsys.readouterr()
    module, summary = Run(store)(tmp_path / "stopped", train, noise=0.05, resume=True)
    assert summary.resumed_from_update == 2
    assert "saved on 2 devices and now on 1" in capsys.readouterr().out
    last = weights(module)
    assert max(float((one[name] - last[name]).abs().max()) for name in one) < 2e-5
