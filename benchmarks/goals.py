"""Every figure in benchmarks/results beside the goal it is held to.

python benchmarks/goals.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
Row = dict[str, Any]

# (supervised share, TTT steps) -> least speed-up, largest share of the memory
STEP_GOALS = {
    (0.25, 3): (3.0, 0.5),
    (0.25, 7): (3.5, 0.5),
    (0.5, 3): (2.0, 0.6),
    (0.5, 7): (2.1, 0.6),
    (1.0, 3): (1.15, 0.7),
    (1.0, 7): (1.25, 0.7),
}


def main() -> None:
    lines = [("result", "what", "figure", "goal", "met")]
    for name, read in READERS.items():
        path = RESULTS / f"{name}.json"
        if not path.is_file():
            lines.append((name, "", "not measured", "", ""))
            continue
        lines += [(name, *rest) for rest in read(json.loads(path.read_text())["rows"])]
    widths = [max(len(line[i]) for line in lines) for i in range(5)]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


Line = tuple[str, str, str, str]


def at_least(what: str, figure: float, goal: float) -> Line:
    return what, f"{figure:.3f}", f">= {goal}", "yes" if figure >= goal else "no"


def at_most(what: str, figure: float, goal: float) -> Line:
    return what, f"{figure:.3f}", f"<= {goal}", "yes" if figure <= goal else "no"


def train_step(row: Row) -> Iterator[Line]:
    share, k = row["supervised_share"], row["ttt_steps"]
    speed, memory = STEP_GOALS[share, k]
    where = f"share {share}, K={k}: "
    yield at_least(f"{where}speed-up, every step waited for", row["ratio"], speed)
    if "unbroken_ratio" in row:
        yield at_least(f"{where}speed-up, steps queued as in training", row["unbroken_ratio"], speed)
    yield at_most(f"{where}memory", row["ours_gib"] / row["reference_gib"], memory)


def end_to_end(row: Row) -> Iterator[Line]:
    yield at_least(f"{row['storage']}: of the bare loop", row["ratio"], 0.95)
    yield at_most(f"{row['storage']}: wait for data", row["data_wait_share"], 0.03)


def scaling(row: Row) -> Iterator[Line]:
    where = f"{row['strategy']}, hidden {row['hidden']}: {row['devices']} GPUs against one"
    yield at_least(where, row["ratio"], {2: 1.9, 4: 4 * 0.93, 8: 8 * 0.93}[row["devices"]])


def extract(row: Row) -> Iterator[Line]:
    where = f", {row['storage']} on {row['where']}" if "where" in row else ""
    yield at_least(f"{row['backend']}{where}: of plain prefill", row["ratio"], 0.95)


def fp8_store(row: Row) -> Iterator[Line]:
    yield at_most("bytes", row["bytes_ratio"], 0.52)
    if "acceptance_fp8" in row:
        change = abs(row["acceptance_fp8"] / row["acceptance_bf16"] - 1)
        yield at_most("change of acceptance length", change, 0.005)


def startup(row: Row) -> Iterator[Line]:
    yield at_most(f"{row['command']}: seconds", row["seconds"], 1.5)


def acceptance(rows: list[Row]) -> Iterator[Line]:
    """The defaults against speculators' own trainer, of sets and seeds alike."""
    lengths: dict[tuple[int, float], dict[str, list[float]]] = {}
    for row in rows:
        decoding = lengths.setdefault((row["k"], row["temperature"]), {})
        decoding.setdefault(row["variant"], []).append(row["acceptance_length"])
    for (k, temperature), of in sorted(lengths.items()):
        if {"default", "speculators"} <= of.keys():
            where = f"k={k}, T={temperature:g}: acceptance length, speculators' beside it"
            yield at_least(where, mean(of["default"]), round(mean(of["speculators"]), 3))


def each(read: Callable[[Row], Iterator[Line]]) -> Callable[[list[Row]], Iterator[Line]]:
    return lambda rows: chain.from_iterable(map(read, rows))


READERS: dict[str, Callable[[list[Row]], Iterator[Line]]] = {
    "train_step_h200": each(train_step),
    "end_to_end_h200": each(end_to_end),
    "scaling_h200x2": each(scaling),
    "scaling_wide_h200x2": each(scaling),
    "scaling_h200x4": each(scaling),
    "scaling_wide_h200x4": each(scaling),
    "extract_h200": each(extract),
    "extract_hf_cpu": each(extract),
    "fp8_store": each(fp8_store),
    "startup": each(startup),
    "acceptance_smollm2": acceptance,
}

if __name__ == "__main__":
    main()
