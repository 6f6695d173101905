"""The training step beside speculators' own compiled model, on one GPU in one run, alternating.

python benchmarks/train_step.py --out benchmarks/results/train_step_h200.json
python benchmarks/train_step.py --only timing --shares 0.5 --ttt-steps 3 --profile    # and where its time goes
python benchmarks/train_step.py --wide --only wide    # hidden 7168, vocabulary 163840
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from common import ROOT, matmul_ceiling, write_results
from step_models import QWEN3_8B, SMALL, WIDE, Sizes, build, make_batch, own_step_parts, truth_gradients
from torch import Tensor, nn

from eagle3lab.config.flops import needed_flops
from eagle3lab.config.schema import DraftConfig, OptimConfig
from eagle3lab.draft.pruned.plan import PrunedPlan
from eagle3lab.draft.pruned.step import plan_batch
from eagle3lab.training.optim import build_optimizers
from eagle3lab.training.work import pack_work

CLIP = 0.5
Batch = dict[str, Tensor]


class Side:
    """One of the two that are compared."""

    name: str
    model: nn.Module
    optimizer: torch.optim.Optimizer

    ttt_steps = 3
    queued = 0.0  # seconds until the host has queued a step

    def step(self) -> None:
        nn.utils.clip_grad_norm_(_trainable(self.model), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Reference(Side):
    """speculators' compiled forward, its fused loss, autocast, fused AdamW."""

    name = "reference"

    def __init__(self, sizes: Sizes) -> None:
        from speculators.losses import resolve_loss_config

        self.model = build(sizes, attention="simple_flex_attention")
        self.loss_config = resolve_loss_config("kl_div", "fused")
        self.optimizer = torch.optim.AdamW(_trainable(self.model), lr=1e-4, fused=True)

    def loss(self, batch: Batch, plan: PrunedPlan) -> Tensor:
        del plan
        with torch.autocast("cuda", torch.bfloat16):
            result: Any = self.model(
                **batch, ttt_steps=self.ttt_steps, ttt_step_loss_decay=1.0, loss_config=self.loss_config
            )
        return result[1]


class Ours(Side):
    """The pruned forward with the loss, the optimizer and the frozen weights that `train.py` uses."""

    name = "ours"

    def __init__(self, sizes: Sizes) -> None:
        self.model = build(sizes, attention="simple_flex_attention")
        self.forward = own_step_parts(self.model, torch.bfloat16)
        (self.optimizer,) = build_optimizers(self.model.named_parameters(), OptimConfig())

    def loss(self, batch: Batch, plan: PrunedPlan) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            output = self.forward(self.model, batch, self.ttt_steps, plan=plan)
        return (output.loss_sums / output.num_supervised.clamp(min=1)).sum()


def _trainable(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def resident(side: Any) -> int:
    """Bytes of a side's parameters, buffers and optimizer states between two steps."""
    states = [t for s in side.optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    held = {
        t.data_ptr(): t.numel() * t.element_size()
        for t in (*side.model.parameters(), *side.model.buffers(), *states)
        if t.is_cuda
    }
    return sum(held.values())


def timed(
    side: Any, batches: list[tuple[Batch, PrunedPlan]], steps: int, warm: int
) -> tuple[list[float], int]:
    """Seconds of each step, waited for, and the peak of allocated memory."""
    seconds, queued = [], []
    for i in range(warm + steps):
        if i == warm:
            torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        start = time.perf_counter()
        batch, plan = batches[i % len(batches)]
        loss = side.loss(batch, plan)
        loss.backward()
        side.step()
        queued.append(time.perf_counter() - start)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    side.queued = statistics.median(queued[warm:])
    return seconds[warm:], torch.cuda.max_memory_allocated()


def unbroken(side: Any, batches: list[tuple[Batch, PrunedPlan]], steps: int) -> float:
    """Seconds per step of steps that are queued one after the other, as training queues them."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for i in range(steps):
        side.loss(*batches[i % len(batches)]).backward()
        side.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps


def counters() -> str:
    """What Dynamo compiled so far."""
    stats = torch._dynamo.utils.counters
    return f"graphs {stats['stats'].get('unique_graphs', 0)}, breaks {sum(stats['graph_break'].values())}"


def first(side: Any, batches: list[tuple[Batch, PrunedPlan]]) -> None:
    start = time.perf_counter()
    side.loss(*batches[0]).backward()
    side.step()
    torch.cuda.synchronize()
    print(f"  {side.name}: first step {time.perf_counter() - start:.1f} s; {counters()}", flush=True)


def compare(
    sides: tuple[Reference, Ours], sizes: Sizes, share: float, ttt_steps: int, steps: int, ceiling: float
) -> dict[str, Any]:
    """One row of the table: both sides on the same packs, in turn."""
    batches = []
    for seed in range(2):
        batch = make_batch(sizes, share, ttt_steps, seed)
        host = {k: v.cpu() for k, v in batch.items() if k in ("document_ids", "loss_mask", "position_ids")}
        start = time.perf_counter()
        plan = plan_batch(sides[1].model, host, ttt_steps, cuda=True)
        planned = time.perf_counter() - start
        batches.append((batch, plan.to("cuda")))
    work = pack_work(host, ttt_steps)
    draft = DraftConfig(name="eagle3", ttt_steps=ttt_steps, vocab_size=sizes.draft_vocab)
    flops = needed_flops(draft, sizes.shapes(), 3, work, pruned=True)
    print(
        f"share {share} K={ttt_steps}: rows {plan.num_rows} in {plan.rows.numel()}, context {plan.num_context}, "
        f"plan on the host {planned * 1e3:.1f} ms, needed {flops / 1e12:.1f} TFLOP",
        flush=True,
    )
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    peak: dict[str, int] = {}
    for side in sides:
        side.ttt_steps = ttt_steps
        first(side, batches)
    for _round in range(2):
        for side, other in (sides, sides[::-1]):
            times, allocated = timed(side, batches, steps=steps, warm=2)
            seconds[side.name] += times
            peak[side.name] = allocated - resident(other)
    queued = {side.name: [unbroken(side, batches, 2 * steps)] for side in sides}
    for side in sides[::-1]:
        queued[side.name].append(unbroken(side, batches, 2 * steps))
    tokens = sizes.seq_len
    flow = {name: tokens / statistics.mean(values) for name, values in queued.items()}
    speed = {name: tokens / statistics.median(values) for name, values in seconds.items()}
    spread = {name: (min(v) * 1e3, statistics.median(v) * 1e3, max(v) * 1e3) for name, v in seconds.items()}
    mfu = flops / tokens * speed["ours"] / ceiling
    for name, (low, median, high) in spread.items():
        print(
            f"  {name}: {median:.1f} ms ({low:.1f} to {high:.1f}), {speed[name]:,.0f} tok/s, {peak[name] / 2**30:.2f} GiB"
        )
    print("  unbroken: " + ", ".join(f"{name} {value:,.0f} tok/s" for name, value in flow.items()), end="")
    print(f", ratio {flow['ours'] / flow['reference']:.2f}")
    print("  host done after " + ", ".join(f"{s.name} {s.queued * 1e3:.1f} ms" for s in sides))
    ratio, memory = speed["ours"] / speed["reference"], peak["ours"] / peak["reference"]
    print(
        f"  ratio {ratio:.2f}, memory {memory:.2f}, ours at {mfu:.1%} of the ceiling; {counters()}",
        flush=True,
    )
    return {
        "supervised_share": share,
        "ttt_steps": ttt_steps,
        "hidden": sizes.hidden,
        "reference_tok_s": round(speed["reference"]),
        "ours_tok_s": round(speed["ours"]),
        "ratio": round(ratio, 3),
        "reference_gib": round(peak["reference"] / 2**30, 2),
        "ours_gib": round(peak["ours"] / 2**30, 2),
        "memory_ratio": round(memory, 3),
        "ours_mfu": round(mfu, 4),
        "reference_unbroken_tok_s": round(flow["reference"]),
        "ours_unbroken_tok_s": round(flow["ours"]),
        "unbroken_ratio": round(flow["ours"] / flow["reference"], 3),
    }


def profile(side: Ours, batches: list[tuple[Batch, PrunedPlan]]) -> None:
    """The kernels that one step of ours spends its time in."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    with record(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        side.loss(*batches[0]).backward()
        side.step()
        torch.cuda.synchronize()
    averages: Any = trace.key_averages()
    print(averages.table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70), flush=True)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """|a - b| / |b| over all gradients together."""
    apart = sum(float((a[n].double() - b[n].double()).pow(2).sum()) for n in b)
    return (apart / sum(float(g.double().pow(2).sum()) for g in b.values())) ** 0.5


def gradients(side: Any, batch: Batch, plan: PrunedPlan) -> tuple[float, dict[str, Tensor]]:
    loss = side.loss(batch, plan)
    loss.backward()
    found = {n: p.grad.clone() for n, p in side.model.named_parameters() if p.grad is not None}
    side.optimizer.zero_grad()
    return loss.item(), found


def exact_in_fp32() -> dict[str, float]:
    """Hidden 512 in fp32 on the GPU, compiled, FlexAttention: worst difference from speculators' dense forward."""
    torch.backends.cuda.matmul.allow_tf32 = False
    worst: dict[str, float] = {}
    for share, k in ((0.25, 1), (0.5, 3), (0.99, 3)):
        model = build(SMALL, attention="sdpa")
        batch = {
            key: v.float() if v.is_floating_point() else v
            for key, v in make_batch(SMALL, share, k, 0).items()
        }
        expected_loss, expected = truth_gradients(model, batch, k)
        forward = own_step_parts(model, torch.float32)
        output = forward(model, batch, k, plan=None)
        loss = (output.loss_sums / output.num_supervised.clamp(min=1)).sum()
        model.zero_grad()
        loss.backward()
        found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert found.keys() == expected.keys(), set(found) ^ set(expected)
        apart = max(float((found[n] - g).abs().max() / g.abs().max()) for n, g in expected.items())
        relative = abs(loss.item() - expected_loss) / expected_loss
        print(
            f"fp32 hidden 512 share {share} K={k}: loss {loss.item():.6f}, apart {relative:.1e}; worst gradient apart {apart:.1e}",
            flush=True,
        )
        worst = {
            "loss": max(worst.get("loss", 0), relative),
            "gradient": max(worst.get("gradient", 0), apart),
        }
    return worst


def near_in_bf16(sides: tuple[Reference, Ours], sizes: Sizes, ttt_steps: int) -> dict[str, Any]:
    """Full size: distance of each side's bf16 gradient from the fp32 one, on the same weights and pack."""
    batch = make_batch(sizes, 0.5, ttt_steps, 0)
    plan = plan_batch(sides[1].model, batch, ttt_steps).to("cuda")
    dense = build(sizes, attention="sdpa")
    expected_loss, expected = truth_gradients(dense, batch, ttt_steps)
    del dense
    gc.collect()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {"ttt_steps": ttt_steps, "fp32_loss": expected_loss}
    found = {}
    for side in sides:
        side.ttt_steps = ttt_steps
        loss, found[side.name] = gradients(side, batch, plan)
        result[side.name] = distance(found[side.name], expected)
        print(
            f"bf16 K={ttt_steps} {side.name}: loss {loss:.6f} (fp32 {expected_loss:.6f}), gradient {result[side.name]:.4f} from fp32",
            flush=True,
        )
    result["ratio"] = result["ours"] / result["reference"]
    result["between"] = distance(found["ours"], found["reference"])
    print(
        f"bf16 K={ttt_steps}: ours / reference {result['ratio']:.3f}, between them {result['between']:.4f}",
        flush=True,
    )
    return result


def guarded(what: str, function: Callable[[], Any]) -> Any:
    """A failure is printed and ends this part alone."""
    start = time.perf_counter()
    try:
        return function()
    except Exception:
        print(f"FAILED: {what}\n{traceback.format_exc()[-3500:]}", flush=True)
        return None
    finally:
        gc.collect()
        torch.cuda.empty_cache()
        print(f"[{what}: {time.perf_counter() - start:.1f} s]", flush=True)


def wide(ceiling: float) -> dict[str, Any]:
    """Hidden 7168: ours alone, and the reference if it fits."""
    results: dict[str, Any] = {}
    for kind in (Ours, Reference):
        side: Any = kind(WIDE)
        side.ttt_steps = 3
        batch = make_batch(WIDE, 0.5, 3, 0)
        plan = plan_batch(side.model, batch, 3).to("cuda")
        first(side, [(batch, plan)])
        seconds, peak = timed(side, [(batch, plan)], steps=5, warm=1)
        median = statistics.median(seconds)
        print(
            f"wide {side.name}: {median * 1e3:.1f} ms, {WIDE.seq_len / median:,.0f} tok/s, {peak / 2**30:.1f} GiB",
            flush=True,
        )
        results[side.name] = {"tok_s": round(WIDE.seq_len / median), "gib": round(peak / 2**30, 1)}
        del side, batch, plan
        gc.collect()
        torch.cuda.empty_cache()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/train_step_h200.json")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.25, 1.0])
    parser.add_argument("--ttt-steps", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--wide", action="store_true")
    parser.add_argument("--only", nargs="+", choices=["exact", "bf16", "timing", "wide"])
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each of two rounds")
    arguments = parser.parse_args()

    began = time.perf_counter()
    ceiling = matmul_ceiling()
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, bf16 matmul ceiling {ceiling / 1e12:.0f} TFLOP/s",
        flush=True,
    )
    chosen = set(arguments.only or ["exact", "bf16", "timing"]) | ({"wide"} if arguments.wide else set())
    notes: dict[str, Any] = {"matmul_tflops": ceiling / 1e12}
    rows: list[dict[str, Any]] = []
    if "exact" in chosen:
        notes["fp32"] = guarded("fp32 exactness", exact_in_fp32)
        torch._dynamo.reset()  # else widths count as dynamic for having been others before
    if chosen & {"bf16", "timing"}:
        sides = guarded("build", lambda: (Reference(QWEN3_8B), Ours(QWEN3_8B)))
        shares, steps = arguments.shares, arguments.ttt_steps
        for k in steps if "bf16" in chosen else ():  # before any weight moves
            notes[f"bf16_k{k}"] = guarded(f"bf16 K={k}", partial(near_in_bf16, sides, QWEN3_8B, k))
        for k, share in product(steps, shares) if "timing" in chosen else ():
            row = guarded(
                f"timing {share} K={k}", partial(compare, sides, QWEN3_8B, share, k, arguments.steps, ceiling)
            )
            if row is not None:
                rows.append({**row, "max_rel_grad_diff": (notes.get("fp32") or {}).get("gradient")})
                write_results(arguments.out, rows, notes=notes)  # what is measured stays, whatever comes
        if arguments.profile and sides:
            batch = make_batch(QWEN3_8B, 0.5, 3, 0)
            plan = plan_batch(sides[1].model, batch, 3).to("cuda")
            sides[1].ttt_steps = 3
            guarded("profile", lambda: profile(sides[1], [(batch, plan)]))
        sides = None
        gc.collect()
        torch.cuda.empty_cache()
    if "wide" in chosen:
        torch._dynamo.reset()
        notes["wide"] = guarded("wide", lambda: wide(ceiling))
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)
    write_results(arguments.out, rows, notes=notes)


if __name__ == "__main__":
    main()
