"""How FlexAttention's tile sizes do on the pruned step's attention: forward and backward of one TTT step.

python benchmarks/flex_options.py --shares 0.5 1.0
"""

from __future__ import annotations

import argparse
import time
from itertools import zip_longest
from typing import Any

import torch
from step_models import QWEN3_8B, make_batch
from torch import Tensor

from eagle3lab.draft.pruned.attention import Attention, flex_attention
from eagle3lab.draft.pruned.plan import ROW_BUCKET, ROWS, plan_pack

# queries, keys, stages, warps; the first is torch 2.11's own on Hopper at head size 128
FORWARD = [
    None,
    (128, 128, 3, 8),
    (128, 128, 2, 8),
    (128, 64, 2, 8),
    (128, 64, 4, 8),
    (128, 64, 3, 4),
    (64, 64, 3, 4),
    (64, 128, 2, 4),
    (64, 64, 4, 4),
]
# queries and keys of the dK, dV loop, queries and keys of the dQ loop, stages, warps
BACKWARD = [
    None,
    (64, 128, 128, 64, 3, 8),
    (64, 128, 128, 64, 2, 8),
    (64, 64, 64, 64, 3, 4),
    (64, 64, 64, 64, 2, 4),
    (64, 64, 64, 64, 1, 4),
    (32, 64, 64, 32, 3, 4),
    (32, 128, 128, 32, 3, 4),
    (128, 128, 128, 128, 2, 8),
    (64, 128, 128, 64, 1, 8),
]


def options(forward: Any, backward: Any) -> dict[str, Any]:
    """The names that `kernel_options` has for them."""
    made: dict[str, Any] = {}
    if forward:
        made |= dict(
            zip(("fwd_BLOCK_M", "fwd_BLOCK_N", "fwd_num_stages", "fwd_num_warps"), forward, strict=True)
        )
    if backward:
        names = ("BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps")
        made |= dict(zip((f"bwd_{n}" for n in names), backward, strict=True))
    return made


def milliseconds(attend: Attention, tensors: list[Tensor]) -> tuple[float, float]:
    """Of the median forward and backward, by the device's clock."""
    marks = []
    grad: Tensor | None = None
    for _ in range(12):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        out, lse = attend(*tensors)
        grad = torch.randn_like(out) if grad is None else grad
        events[1].record()
        torch.autograd.grad((out, lse), tensors, (grad, torch.ones_like(lse)))
        events[2].record()
        marks.append(events)
    torch.cuda.synchronize()
    forward = sorted(a.elapsed_time(b) for a, b, _ in marks[4:])
    backward = sorted(b.elapsed_time(c) for _, b, c in marks[4:])
    return forward[len(forward) // 2], backward[len(backward) // 2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5])
    parser.add_argument("--limit", type=float, default=240.0, help="seconds")
    arguments = parser.parse_args()
    began = time.perf_counter()
    sizes = QWEN3_8B
    for share in arguments.shares:
        batch = {k: v.cpu() for k, v in make_batch(sizes, share, 3, 0).items()}
        plan = plan_pack(batch["document_ids"], batch["loss_mask"], 3, bucket=ROW_BUCKET, flex=True)
        lists = plan.to("cuda").blocks[ROWS, None]
        shapes = [(sizes.heads, plan.rows.numel()), *[(sizes.kv_heads, plan.context.numel())] * 2]
        tensors = [
            torch.randn(n, h, 128, device="cuda", dtype=torch.bfloat16).transpose(0, 1).requires_grad_()
            for h, n in shapes
        ]
        for forward, backward in zip_longest(FORWARD, BACKWARD):
            if time.perf_counter() - began > arguments.limit:
                print("out of time")
                return
            try:
                times = milliseconds(
                    flex_attention(lists, 128**-0.5, True, options(forward, backward)), tensors
                )
                print(
                    f"share {share}: forward {forward} {times[0]:.3f} ms, backward {backward} {times[1]:.3f} ms",
                    flush=True,
                )
            except Exception as error:
                print(
                    f"share {share}: {forward} {backward} {type(error).__name__} {str(error)[:120]}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
