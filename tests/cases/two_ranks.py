"""One rank of the PAR cases: `torchrun ... two_ranks.py STORE OUT SEQ_LEN`. What it finds lies in OUT/rank*.json."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers.logger import DummyLogger

from eagle3lab.config.errors import StoppedBySignal
from eagle3lab.store.reader import StoreReader
from eagle3lab.training import module as training_module
from eagle3lab.training.metrics import Sums

HERE = Path(__file__).parent


class TerminateThisRank(DummyLogger):
    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        if step == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def main(store: Path, out: Path, seq_len: int) -> None:
    import torch

    spec = importlib.util.spec_from_file_location("case_run", HERE / "case_run.py")
    assert spec is not None
    assert spec.loader is not None
    sys.modules["case_run"] = case_run = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(case_run)
    rank = int(os.environ["RANK"])
    run = case_run.Run(StoreReader(store), num_ranks=2)
    batches: dict[str, list[list[int]]] = {"training": [], "validation": []}
    for stage, seen in batches.items():
        original = getattr(training_module.Eagle3Module, f"{stage}_step")

        def step(self: Any, batch: Any, batch_idx: int, seen: Any = seen, original: Any = original) -> Any:
            seen.append(batch["row_index"].tolist())
            return original(self, batch, batch_idx)

        setattr(training_module.Eagle3Module, f"{stage}_step", step)
    train = case_run.config(seq_len=seq_len, tokens_per_update=2 * seq_len, max_epochs=2)
    module, summary = run(out / "two", train, noise=0.05)
    found: dict[str, Any] = {"batches": {stage: list(seen) for stage, seen in batches.items()}}
    found["validation"] = summary.last_validation
    if rank == 0:
        torch.save(case_run.weights(module), out / "weights.pt")

    # PAR-04: one tensor under two names, reduced twice
    counts = case_run.expected("PAR-04")["ranks"][rank]
    correct, total = torch.tensor([float(counts["correct"])]), torch.tensor([float(counts["total"])])
    sums = Sums({"correct": 1, "also_correct": 1, "total": 1}, "cpu")
    sums.add({"correct": correct, "also_correct": correct, "total": total})
    found["reduced"] = [sums.reduce(), sums.reduce()]
    found["own"] = [correct.tolist(), total.tolist()]

    try:  # a signal to the second rank alone
        run(out / "stopped", train, noise=0.05, loggers=(TerminateThisRank(),) if rank == 1 else ())
    except StoppedBySignal as stopped:
        found["stopped"] = str(stopped)
    (out / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
