"""specforge's EAGLE-3 step beside speculators' and ours, on one GPU in one run, alternating, on the same tokens.

python benchmarks/specforge_step.py --out benchmarks/results/specforge_h200.json
TRITON_INTERPRET=1 TORCHDYNAMO_DISABLE=1 python benchmarks/specforge_step.py --small   # agreement alone, on the CPU

specforge's requirements pin an inference engine that its step does not use: `pip install --no-deps specforge==0.2.0`.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import ROOT, write_results
from specforge_side import NOTES, SpecForge, as_rows, plain_residual
from step_models import QWEN3_8B, SMALL, Sizes, build, make_batch, truth_gradients
from torch import Tensor
from train_step import Ours, Reference, Side, distance, first, gradients, guarded, resident, timed, unbroken

from eagle3lab.draft.pruned.step import plan_batch


@torch.no_grad()
def target_entropy(source: Any, batch: dict[str, Tensor]) -> float:
    """Mean entropy of the verifier over the draft vocabulary at the supervised tokens."""
    counted = batch["loss_mask"][0] > 0
    states = source.verifier_norm(batch["verifier_last_hidden_states"][0][counted].float())
    total = 0.0
    for part in states.split(1024):
        log_p = (part @ source.verifier_lm_head.weight.float().T).log_softmax(dim=-1)
        total -= float((log_p.exp() * log_p).sum())
    return total / int(counted.sum())


def agreement(sizes: Sizes, sides: list[Any], share: float, ttt_steps: int, device: str) -> dict[str, Any]:
    """Loss and gradient of every side beside speculators' dense fp32 forward, on the same weights and pack."""
    batch = make_batch(sizes, share, ttt_steps, 0, device)
    dense = build(sizes, attention="sdpa", device=device)
    plain_residual(dense)
    entropy, supervised = target_entropy(dense, batch), int(batch["loss_mask"].sum())
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    rows = as_rows(dense, batch, sizes.document, dtype)
    expected_loss, expected = truth_gradients(dense, batch, ttt_steps)
    del dense
    gc.collect()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {"ttt_steps": ttt_steps, "supervised_share": share, "fp32_loss": expected_loss}
    for side in sides:
        side.ttt_steps = ttt_steps
        if isinstance(side, SpecForge):
            loss, found = side.gradients(rows, supervised, entropy)
        else:
            loss, found = gradients(side, batch, plan_batch(side.model, batch, ttt_steps).to(device))
        assert found.keys() == expected.keys(), set(found) ^ set(expected)
        result[side.name] = {"loss": loss, "gradient_from_fp32": distance(found, expected)}
        print(
            f"K={ttt_steps} {side.name}: loss {loss:.6f} (dense fp32 {expected_loss:.6f}), "
            f"gradient {result[side.name]['gradient_from_fp32']:.2e} from it",
            flush=True,
        )
    return result


def held(side: Side, batches: list[tuple[Any, Any]]) -> int:
    """Bytes a side keeps between two steps, its batches among them."""
    masters = side.mixed.fp32_params if isinstance(side, SpecForge) else []
    tensors = [t for b, _ in batches for t in getattr(b, "tensors", b).values()]
    return resident(side) + sum(t.numel() * t.element_size() for t in (*masters, *tensors))


def compare(
    sizes: Sizes, sides: list[Any], source: Any, share: float, ttt_steps: int, steps: int
) -> dict[str, Any]:
    """One row of the table: every side on the same two packs, forth and back, twice."""
    packs = [make_batch(sizes, share, ttt_steps, seed) for seed in range(2)]
    batches: dict[str, list[tuple[Any, Any]]] = {}
    for side in sides:
        side.ttt_steps = ttt_steps
        if isinstance(side, SpecForge):
            document = sizes.seq_len if side.name == "specforge_one_row" else sizes.document
            made: list[Any] = [(as_rows(source, pack, document, torch.bfloat16), None) for pack in packs]
        else:
            made = [(pack, plan_batch(side.model, pack, ttt_steps).to("cuda")) for pack in packs]
        batches[side.name] = made
        first(side, made)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    queued: dict[str, list[float]] = {side.name: [] for side in sides}
    peak: dict[str, int] = {}
    for side in (*sides, *sides[::-1]):
        mine = batches[side.name]
        torch.cuda.synchronize()
        idle = torch.cuda.memory_allocated()
        times, allocated = timed(side, mine, steps=steps, warm=2)
        seconds[side.name] += times
        peak[side.name] = allocated - idle + held(side, mine)
        queued[side.name].append(unbroken(side, mine, 2 * steps))
    row: dict[str, Any] = {"supervised_share": share, "ttt_steps": ttt_steps, "hidden": sizes.hidden}
    for name, values in seconds.items():
        row[name] = {
            "tok_s": round(sizes.seq_len / statistics.median(values)),
            "unbroken_tok_s": round(sizes.seq_len / statistics.mean(queued[name])),
            "ms": [round(1e3 * f(values), 1) for f in (min, statistics.median, max)],
            "gib": round(peak[name] / 2**30, 2),
        }
        print(f"  share {share} K={ttt_steps} {name}: {row[name]}", flush=True)
    if "ours" in row:
        for name in (n for n in seconds if n != "ours"):
            row[f"ours_over_{name}"] = {
                "tok_s": round(row["ours"]["tok_s"] / row[name]["tok_s"], 3),
                "unbroken_tok_s": round(row["ours"]["unbroken_tok_s"] / row[name]["unbroken_tok_s"], 3),
                "gib": round(row["ours"]["gib"] / row[name]["gib"], 3),
            }
            print(f"  ours / {name}: {row[f'ours_over_{name}']}", flush=True)
    return row


def on_cpu() -> None:
    """Small shapes in fp32: whether specforge's loss and gradients are the dense forward's."""
    source = build(SMALL, attention="sdpa", device="cpu")
    plain_residual(source)
    side = SpecForge(SMALL, source, "sdpa", torch.float32)
    for share, k in ((0.5, 1), (0.5, 3), (1.0, 3)):
        agreement(SMALL, [side], share, k, "cpu")
    rows = as_rows(source, make_batch(SMALL, 0.5, 3, 0, "cpu"), SMALL.document, torch.float32)
    for name in ("before", "after"):
        loss = side.loss(rows)
        print(f"{name} a step: {loss.item():.6f}")
        loss.backward()
        side.step()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/specforge_h200.json")
    parser.add_argument("--small", action="store_true", help="agreement on small shapes in fp32 on the CPU")
    parser.add_argument("--steps", type=int, default=5, help="timed steps of each of two rounds")
    parser.add_argument("--ttt-steps", type=int, nargs="+", default=[3, 7])
    parser.add_argument("--attention", choices=["flex_attention", "sdpa"], default="flex_attention")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 1.0])
    arguments = parser.parse_args()
    if arguments.small:
        on_cpu()
        return

    began = time.perf_counter()
    reference, ours = Reference(QWEN3_8B), Ours(QWEN3_8B)
    for side in (reference, ours):
        plain_residual(side.model)
    specforge = SpecForge(QWEN3_8B, reference.model, arguments.attention, torch.bfloat16)
    sides: list[Any] = [reference, ours, specforge]
    notes: dict[str, Any] = {**NOTES, "specforge": version("specforge")}
    rows: list[dict[str, Any]] = []
    k = arguments.ttt_steps[0]
    notes["agreement"] = guarded("agreement", partial(agreement, QWEN3_8B, sides, 0.5, k, "cuda"))
    kept = specforge.variant("specforge_kept", keep_cache=True)
    for steps in arguments.ttt_steps:
        for share in arguments.shares:
            run = partial(compare, QWEN3_8B, [*sides, kept], reference.model, share, steps, arguments.steps)
            rows += filter(None, [guarded(f"share {share} K={steps}", run)])
            write_results(arguments.out, rows, notes=notes)  # what is measured stays, whatever comes
        if steps == k:
            shipped = SpecForge(
                QWEN3_8B, reference.model, arguments.attention, torch.bfloat16, train_head=True
            ).variant("specforge_shipped")
            others = [
                ours,
                specforge,
                shipped,
                specforge.variant("specforge_compact", compact=True),
                specforge.variant("specforge_one_row"),
            ]
            run = partial(compare, QWEN3_8B, others, reference.model, arguments.shares[0], k, arguments.steps)
            rows += filter(None, [guarded("variants", run)])
            write_results(arguments.out, rows, notes=notes)
    gc.collect()
    print(f"{time.perf_counter() - began:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
