"""A bf16 store beside an fp8 store of the same rows: bytes, error per layer, and what a draft makes of each.

python benchmarks/fp8_store.py --out benchmarks/results/fp8_store.json hardware=h200 data.max_tokens=null
Words after the options are overrides of `extract.py`, `train.py` and `evaluate.py`, each taken where it applies.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write_results

from eagle3lab.store.reader import StoreReader

STORAGES = ("bfloat16", "float8_e4m3")
STATES = ("aux_hidden_states", "verifier_last_hidden_states")


def run(*words: str) -> None:
    """One of the entry points as a user types it."""
    print("$ python", " ".join(words), flush=True)
    subprocess.run([sys.executable, *words], cwd=ROOT, check=True)


def num_bytes(store: Path) -> int:
    return sum(file.stat().st_size for file in (store / "shards").iterdir())


def relative_errors(exact: StoreReader, other: StoreReader) -> dict[str, tuple[float, float]]:
    """(mean, worst) over tokens of |other - exact| / |exact|, by layer; rows must be the same."""
    hidden = exact.manifest.verifier.hidden_size
    names = [f"layer {k}" for k in exact.manifest.layer_ids] + ["last"]
    sums, worst, count = torch.zeros(len(names)), torch.zeros(len(names)), 0
    for i, (mine, theirs) in enumerate(zip(exact.rows, other.rows, strict=True)):
        assert mine.row_id == theirs.row_id
        a, b = exact.read(i), other.read(i)
        left, right = (
            torch.cat([row[name] for name in STATES], dim=1).float().view(-1, len(names), hidden)
            for row in (a, b)
        )
        error = (right - left).norm(dim=-1) / left.norm(dim=-1)  # shape: [T, layers]
        sums, worst, count = sums + error.sum(dim=0), worst.maximum(error.amax(dim=0)), count + len(error)
    return {
        name: (float(mean), float(most)) for name, mean, most in zip(names, sums / count, worst, strict=True)
    }


def only(words: Iterable[str], *prefixes: str) -> list[str]:
    """The overrides that begin with one of the groups an entry point has."""
    return [word for word in words if word.lstrip("+").partition("=")[0].partition(".")[0] in prefixes]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/tmp/fp8_store"))
    parser.add_argument("overrides", nargs="*")
    arguments = parser.parse_args()
    words, work = arguments.overrides, arguments.work
    extract_words = only(words, "model", "data", "hardware", "extract")
    train_words = only(words, "model", "data", "hardware", "noise", "draft", "loss", "optim", "train")
    evaluate_words = only(words, "model", "hardware", "prompts", "decode")
    unused = set(words) - {*extract_words, *train_words, *evaluate_words}
    if unused:
        parser.error(f"overrides that apply nowhere: {' '.join(sorted(unused))}")

    measured: dict[str, dict[str, Any]] = {}
    for storage in STORAGES:
        store, out = work / f"store-{storage}", work / f"run-{storage}"
        run("extract.py", *extract_words, f"extract.dtype={storage}", f"store={store}")
        if not (out / "summary.json").is_file():  # what is there is not made again
            run("train.py", "experiment=demo", *train_words, f"store={store}", f"run_dir={out}")
        decoded = work / f"evaluation-{storage}"
        if not (decoded / "evaluation.json").is_file():
            run("evaluate.py", f"draft={out / 'draft'}", *evaluate_words, f"out={decoded}")
        summary = json.loads((out / "summary.json").read_text())
        evaluation = json.loads((decoded / "evaluation.json").read_text())
        measured[storage] = {
            "bytes": num_bytes(store),
            "train_loss": summary["last"]["train/loss"],
            "validation_loss": summary["best_validation"]["val/loss"],
            "simulated": summary["best_validation"]["val/simulated_acceptance_length"],
            "updates": summary["best_validation"]["update"],
            "acceptance": evaluation["variants"][0]["overall"],
        }
        print(json.dumps({storage: measured[storage]}), flush=True)
    exact, small = measured["bfloat16"], measured["float8_e4m3"]
    readers = [StoreReader(work / f"store-{storage}") for storage in STORAGES]
    errors = relative_errors(*readers)
    row = {
        "tokens": readers[0].manifest.num_tokens,
        "bytes_ratio": small["bytes"] / exact["bytes"],
        "mean_rel_error": {name: mean for name, (mean, _) in errors.items()},
        "worst_rel_error_by_layer": {name: worst for name, (_, worst) in errors.items()},
        "worst_rel_error": max(worst for _, worst in errors.values()),
    }
    for name, values in (("bf16", exact), ("fp8", small)):
        row |= {f"{key}_{name}": values[key] for key in ("train_loss", "validation_loss", "simulated")}
        row[f"updates_{name}"] = values["updates"]
        row[f"acceptance_{name}"] = values["acceptance"]["acceptance_length"]
        row[f"interval_{name}"] = [
            values["acceptance"][f"acceptance_length_{end}"] for end in ("low", "high")
        ]
    write_results(arguments.out, [row])
    print(json.dumps(row, indent=1))
    change = math.fabs(row["train_loss_fp8"] / row["train_loss_bf16"] - 1)
    print(
        f"fp8: {row['bytes_ratio']:.4f} of the bytes, worst relative error {row['worst_rel_error']:.4f}, "
        f"training loss changes by {change:.3%}, acceptance {row['acceptance_bf16']:.3f} -> "
        f"{row['acceptance_fp8']:.3f}"
    )


if __name__ == "__main__":
    main()
