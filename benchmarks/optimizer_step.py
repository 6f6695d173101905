"""What an update of each optimizer costs at real widths: time of a step over the draft's fp32 masters, and its states.

python benchmarks/optimizer_step.py --out benchmarks/results/optimizer_step_h200.json
python benchmarks/optimizer_step.py --small --device cpu --out /tmp/optimizer_step.json    # does it run

Gradients are random. Nothing but the optimizers' own steps is timed: beside one pack of 8192 tokens at a time this is
what an update adds, beside n of them an n-th.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write_results
from torch import nn

from eagle3lab.config.schema import OptimConfig, OptimKind
from eagle3lab.training.optim import build_optimizers

# hidden, intermediate, width of queries, of keys; the frozen head of the verifier is none of the trained
SMOLLM2 = (576, 1536, 576, 192)
QWEN3_8B = (4096, 12288, 4096, 1024)
KIMI_K25 = (7168, 18432, 8192, 8192)
SMALL = (128, 384, 128, 64)


def trained(hidden: int, ffn: int, queries: int, keys: int, device: str) -> dict[str, nn.Parameter]:
    """The trained parameters of a draft of one layer, random, with random gradients."""
    shapes = {
        "fc": (hidden, 3 * hidden),
        "layers.0.self_attn.q_proj": (queries, 2 * hidden),
        "layers.0.self_attn.k_proj": (keys, 2 * hidden),
        "layers.0.self_attn.v_proj": (keys, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, queries),
        "layers.0.mlp.gate_proj": (ffn, hidden),
        "layers.0.mlp.up_proj": (ffn, hidden),
        "layers.0.mlp.down_proj": (hidden, ffn),
        **dict.fromkeys(("hidden_norm", "input_layernorm", "post_attention_layernorm", "norm"), (hidden,)),
    }
    generator = torch.Generator(device).manual_seed(0)
    made = {}
    for name, shape in shapes.items():
        made[name] = nn.Parameter(torch.randn(shape, device=device, generator=generator) * 0.02)
        made[name].grad = torch.randn(shape, device=device, generator=generator)
    return made


def steps_of(
    parameters: dict[str, nn.Parameter], kind: OptimKind, device: str, repeats: int
) -> dict[str, Any]:
    """The median of `repeats` steps after two that allocate, and the bytes of all states."""
    optimizers = build_optimizers(parameters.items(), OptimConfig(kind=kind, lr=1e-3))
    taken = []
    for _ in range(2 + repeats):
        _wait(device)
        start = time.perf_counter()
        for optimizer in optimizers:
            optimizer.step()
        _wait(device)
        taken.append(time.perf_counter() - start)
    states = [t for o in optimizers for state in o.state.values() for t in state.values()]
    return {
        "optimizer": kind.value,
        "milliseconds": round(1e3 * statistics.median(taken[2:]), 3),
        "states_gib": round(sum(t.nbytes for t in states if isinstance(t, torch.Tensor)) / 2**30, 3),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/optimizer_step_h200.json")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="does it run")
    parser.add_argument("--repeats", type=int, default=10)
    arguments = parser.parse_args()
    rows = []
    for sizes in (SMALL,) if arguments.small else (SMOLLM2, QWEN3_8B, KIMI_K25):
        parameters = trained(*sizes, arguments.device)
        about = {"hidden": sizes[0], "trained_parameters": sum(p.numel() for p in parameters.values())}
        for kind in OptimKind:
            rows.append(about | steps_of(parameters, kind, arguments.device, arguments.repeats))
            print(rows[-1], flush=True)
    write_results(arguments.out, rows)


if __name__ == "__main__":
    main()
