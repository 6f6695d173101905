"""`train.py` from a store on disk beside the bare step loop of speculators' own model, on one GPU in one run.

python benchmarks/train_end_to_end.py --out benchmarks/results/end_to_end_h200.json
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from common import ROOT, matmul_ceiling, write_results
from speculators.losses import resolve_loss_config
from synthetic import LAYER_IDS, QWEN3_8B, make_rows, make_store, make_verifier

from eagle3lab.config.plan import flops_per_token
from eagle3lab.config.schema import DraftConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.packing import PackBatchSampler
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.store.reader import StoreReader
from eagle3lab.training.loader import PackLoader
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.weights import load_edge_weights

SEQ_LEN, DOCUMENT = 8192, 1024


class BareLoop:
    """speculators' own compiled forward, its loss and AdamW on ready batches; compiled once, timed twice."""

    def __init__(self, verifier: Path, ttt_steps: int) -> None:
        import speculators.losses.fused as fused

        # traced inside the compiled forward, the fused loss fails in dynamo
        fused.fused_kl_div_loss = torch.compiler.disable(fused.fused_kl_div_loss)
        facts = read_facts(verifier)
        vocabulary = DraftVocabulary.from_ids(range(32000), facts.vocab_size)
        config = DraftConfig(name="eagle3", ttt_steps=ttt_steps)
        edge = load_edge_weights(facts)
        self.draft = build_draft(config, facts, edge, vocabulary, LAYER_IDS, attention="flex", seed=0)
        self.draft = self.draft.to("cuda").train()
        self.ttt_steps = ttt_steps
        self.trainable = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=1e-4, fused=True)
        self.loss_config = resolve_loss_config("kl_div", "fused")
        self.batches = [self._batch(facts.hidden_size, facts.vocab_size) for _ in range(2)]

    def _batch(self, hidden: int, vocab_size: int) -> dict[str, torch.Tensor]:
        place = torch.arange(SEQ_LEN, device="cuda")
        states = {"device": "cuda", "dtype": torch.bfloat16}
        return {
            "hidden_states": torch.randn(1, SEQ_LEN, len(LAYER_IDS) * hidden, **states),
            "verifier_last_hidden_states": torch.randn(1, SEQ_LEN, hidden, **states),
            "input_ids": torch.randint(10, vocab_size, (1, SEQ_LEN), device="cuda"),
            "document_ids": (place // DOCUMENT)[None],
            "position_ids": (place % DOCUMENT + 1)[None],
            "loss_mask": (place % DOCUMENT >= DOCUMENT // 2)[None].long(),
        }

    def _step(self, batch: dict[str, torch.Tensor]) -> None:
        with torch.autocast("cuda", torch.bfloat16):
            _, loss, _ = self.draft(**batch, ttt_steps=self.ttt_steps, loss_config=self.loss_config)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trainable, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def tokens_per_second(self, updates: int) -> float:
        """Of the median step, each waited for."""
        seconds = []
        for i in range(updates + 3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            self._step(self.batches[i % 2])
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return SEQ_LEN / statistics.median(seconds[3:])


def loader_alone(store: Path, num_threads: int, packs: int) -> float:
    """Tokens/s that the loader delivers to the GPU when nothing is trained."""
    data = Eagle3SampleFileDataset(StoreReader(store), split="train", copy=False)
    order = PackBatchSampler(data.lengths, SEQ_LEN).plan(0)
    device = torch.device("cuda")
    loader = PackLoader(
        data,
        (order * packs)[:packs],
        create_collate_fn(SEQ_LEN, pin_memory=True),
        num_threads=num_threads,
        device=device,
    )
    start, seen = 0.0, 0
    for i, _ in enumerate(loader):
        if i == packs // 3:
            torch.cuda.synchronize()
            start, seen = time.perf_counter(), i
    torch.cuda.synchronize()
    return SEQ_LEN * (packs - 1 - seen) / (time.perf_counter() - start)


def train(verifier: Path, store: Path, out: Path, ttt_steps: int, updates: int) -> dict[str, float]:
    """`summary.json` of a real `train.py` run."""
    command = [
        sys.executable, "train.py", "model=local", "model.name=synthetic", f"model.path={verifier}", "data=jsonl",
        "data.paths=[none]", f"store={store}", "hardware=h200", f"draft.ttt_steps={ttt_steps}",
        f"draft.aux_layer_ids=[{','.join(map(str, LAYER_IDS))}]", f"train.seq_len={SEQ_LEN}",
        "train.max_epochs=null", f"train.max_updates={updates}", f"train.validate_every_updates={updates}",
        f"run_dir={out}",
    ]  # fmt: skip
    print("$", " ".join(command[1:]), flush=True)
    subprocess.run(command, cwd=ROOT, check=True)
    return json.loads((out / "summary.json").read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/end_to_end_h200.json")
    parser.add_argument("--work", type=Path, default=Path("/tmp/eagle3lab-bench"))
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--ttt-steps", type=int, nargs="+", default=[3])
    arguments = parser.parse_args()

    verifier, store = arguments.work / "verifier", arguments.work / "store"
    ceiling = matmul_ceiling()
    print(f"bf16 matmul ceiling {ceiling / 1e12:.0f} TFLOP/s", flush=True)
    make_verifier(verifier, QWEN3_8B, "cuda")
    start = time.perf_counter()
    rows = make_rows(arguments.rows, DOCUMENT + 1, QWEN3_8B.vocab_size, 0.5)
    tokens = make_store(store, verifier, rows, "cuda")
    print(f"store: {tokens:,} tokens in {time.perf_counter() - start:.1f} s", flush=True)

    alone = {n: loader_alone(store, n, 36) for n in (2, 6)}
    print("loader alone, tokens/s by threads:", {n: round(speed) for n, speed in alone.items()}, flush=True)
    results, notes = [], []
    for k in arguments.ttt_steps:
        torch.cuda.reset_peak_memory_stats()
        bare_loop = BareLoop(verifier, k)
        before = bare_loop.tokens_per_second(12)
        gib = torch.cuda.max_memory_allocated() / 2**30
        print(f"bare loop K={k}: {before:,.0f} tokens/s, {gib:.1f} GiB", flush=True)
        torch.cuda.empty_cache()
        summary = train(verifier, store, arguments.work / f"run-k{k}", k, arguments.updates)
        after = bare_loop.tokens_per_second(12)
        print(f"bare loop K={k} again: {after:,.0f} tokens/s", flush=True)
        del bare_loop
        gc.collect()
        torch.cuda.empty_cache()
        bare, speed = max(before, after), summary["tokens_per_second"]
        flops = flops_per_token(DraftConfig(name="eagle3", ttt_steps=k), QWEN3_8B, len(LAYER_IDS), DOCUMENT)
        results.append(
            {
                "storage": "bf16",
                "bare_tok_s": round(bare),
                "train_tok_s": round(speed),
                "ratio": round(speed / bare, 4),
                "data_wait_share": round(summary["data_wait_share"], 4),
                "mfu": round(speed * flops / ceiling, 4),
            }
        )
        notes.append(
            {
                "ttt_steps": k,
                "peak_gib": summary["peak_memory_gib"],
                "bare_peak_gib": gib,
                "bare": [before, after],
            }
        )
        print(results[-1], flush=True)
    all_notes = {"runs": notes, "matmul_tflops": ceiling / 1e12, "loader_alone_tok_s": alone}
    write_results(arguments.out, results, notes=all_notes)


if __name__ == "__main__":
    main()
