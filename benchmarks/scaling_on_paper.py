"""How training should scale over GPUs, from the speed of one and the bytes that are summed; nothing runs here.

python benchmarks/scaling_on_paper.py --out benchmarks/results/scaling_on_paper.json

One update computes its packs, then sums the gradients (fp32) over all devices: the draft's weights are used in every
TTT step, so none is ready before the last part of the backward pass, and it is counted as if nothing overlapped. The speed of one device is that
of the results files (one H200), by the ratio of the peaks on another device; bandwidths are `hardware`'s, as nccl-tests
report busbw.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import ROOT, write_results
from omegaconf import OmegaConf

from eagle3lab.config.plan_sizes import all_reduce_seconds, draft_size, stored_bytes_per_token
from eagle3lab.config.schema import DraftConfig, Shapes, StoreDtype

RESULTS = ROOT / "benchmarks/results"
HARDWARE = ("h200x2", "hopper8", "blackwell8")  # the first one's link is a measured sum
DEVICES = (2, 4, 8)
PACKS = (1, 2, 4)  # of one device in an update
GOAL = 0.93
NUM_AUX = 3


@dataclass(frozen=True)
class Draft:
    """What was measured on one H200: half of the tokens supervised, K=3."""

    model: str
    seq_len: int
    tokens_per_second: float


@dataclass(frozen=True)
class Row:
    model: str
    hardware: str
    link_gb_per_second: float
    devices: int
    packs: int
    gradient_gb: float
    sent_gb: float  # by each device in an update
    computing_ms: float
    sum_ms: float
    efficiency: float
    tokens_per_second: int
    read_gb_per_second: float  # from one shared store in bf16
    packs_for_goal: int


def measured() -> list[Draft]:
    steps = json.loads((RESULTS / "train_step_h200.json").read_text())["rows"]
    half = next(row for row in steps if (row["supervised_share"], row["ttt_steps"]) == (0.5, 3))
    wide = json.loads((RESULTS / "wide_h200.json").read_text())["notes"]["wide"]["ours"]
    return [
        Draft("qwen3_8b", 8192, half["ours_unbroken_tok_s"]),
        Draft("kimi_k25_int4", 4096, wide["tok_s"]),
    ]


def option(group: str, name: str) -> dict[str, Any]:
    return dict(OmegaConf.to_container(OmegaConf.load(ROOT / "conf" / group / f"{name}.yaml"), resolve=False))


def rows_of(draft: Draft, hardware: str) -> list[Row]:
    shapes, where = Shapes(**option("model", draft.model)["shapes"]), option("hardware", hardware)
    link = float(where["link_gb_per_second"])
    speed_of_one = draft.tokens_per_second * where["peak_tflops"] / option("hardware", "h200")["peak_tflops"]
    gradient = 4 * draft_size(DraftConfig(vocab_size=32000), shapes, NUM_AUX).trainable
    one_pack = draft.seq_len / speed_of_one
    stored = stored_bytes_per_token(shapes.hidden_size, NUM_AUX, StoreDtype.bfloat16)
    rows = []
    for devices in DEVICES:
        seconds = all_reduce_seconds(gradient, devices, link)
        for packs in PACKS:
            computing = packs * one_pack
            efficiency = computing / (computing + seconds)
            speed = devices * speed_of_one * efficiency
            rows.append(
                Row(
                    model=draft.model,
                    hardware=hardware,
                    link_gb_per_second=link,
                    devices=devices,
                    packs=packs,
                    gradient_gb=round(gradient / 1e9, 3),
                    sent_gb=round(2 * (devices - 1) / devices * gradient / 1e9, 3),
                    computing_ms=round(1e3 * computing, 1),
                    sum_ms=round(1e3 * seconds, 1),
                    efficiency=round(efficiency, 4),
                    tokens_per_second=round(speed),
                    read_gb_per_second=round(speed * stored / 1e9, 2),
                    packs_for_goal=math.ceil(seconds * GOAL / (1 - GOAL) / one_pack),
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=RESULTS / "scaling_on_paper.json")
    arguments = parser.parse_args()
    rows = [row for draft in measured() for hardware in HARDWARE for row in rows_of(draft, hardware)]
    print("model           hardware    GPUs  packs  computing ms  sum ms  efficiency     tok/s  GB/s read")
    for row in rows:
        print(
            f"{row.model:15} {row.hardware:10} {row.devices:5} {row.packs:6} {row.computing_ms:13,.1f} {row.sum_ms:7,.1f} "
            f"{row.efficiency:11.3f} {row.tokens_per_second:9,} {row.read_gb_per_second:10.2f}"
        )
    write_results(arguments.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
