"""The pruned step beside speculators' forward on the CPU, on packs of a real store, in turn.

python benchmarks/train_step_cpu.py --verifier DIR --store stores/smollm2_135m-demo
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from eagle3lab.config.schema import DraftConfig, LossConfig
from eagle3lab.data.collate import create_collate_fn
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.packing import PackBatchSampler
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.pruned.heads import loss_and_gradient
from eagle3lab.draft.pruned.step import pruned_forward
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.ttt import LossRecorder, TTTOutput, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.weights import load_edge_weights


def step(model: nn.Module, forward: Callable[[], TTTOutput]) -> tuple[float, float, dict[str, Tensor]]:
    """Seconds of forward and backward, the loss, and the gradients."""
    model.zero_grad()
    start = time.perf_counter()
    output = forward()
    loss = (output.loss_sums / output.num_supervised.clamp(min=1)).sum()
    loss.backward()
    seconds = time.perf_counter() - start
    return (
        seconds,
        loss.item(),
        {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None},
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--verifier", type=Path, required=True)
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--ttt-steps", type=int, default=3)
    parser.add_argument("--vocab-size", type=int, default=6144)
    parser.add_argument("--packs", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    facts, store = read_facts(arguments.verifier), StoreReader(arguments.store)
    vocabulary = DraftVocabulary.from_counts(
        store.token_counts(), arguments.vocab_size, always_keep=facts.eos_token_ids
    )
    config = DraftConfig(name="eagle3", ttt_steps=arguments.ttt_steps, vocab_size=arguments.vocab_size)
    edge = load_edge_weights(facts)
    layers = store.manifest.layer_ids
    model = build_draft(config, facts, edge, vocabulary, layers[:3], attention="sdpa", seed=0)
    data = Eagle3SampleFileDataset(
        store, split="train", aux_layer_ids=layers[:3], hidden_states_dtype=torch.float32
    )
    packs = PackBatchSampler(data.lengths, arguments.seq_len).plan(0)[: arguments.packs]
    collate = create_collate_fn(arguments.seq_len)
    recorder = LossRecorder(token_loss(LossConfig()))
    loss = loss_and_gradient(LossConfig(), compiled=False)

    ratios, speeds, k = [], [], arguments.ttt_steps
    for number, rows in enumerate(packs):
        batch = collate([data[row] for row in rows])
        for _ in range(2 if number == 0 else 1):  # the first pack also warms up
            reference = step(model, lambda b=batch: ttt_forward(model, b, k, recorder))
            ours = step(model, lambda b=batch: pruned_forward(model, b, k, loss, compiled=False))
        apart = max(float((ours[2][n] - g).abs().max() / g.abs().max()) for n, g in reference[2].items())
        share = float(batch["loss_mask"].sum()) / arguments.seq_len
        ratios.append(reference[0] / ours[0])
        speeds.append(int((batch["document_ids"] >= 0).sum()) / ours[0])
        print(
            f"{len(rows)} rows, {share:.0%} supervised: reference {reference[0]:.2f} s, pruned {ours[0]:.2f} s, "
            f"{ratios[-1]:.2f}x; loss {reference[1]:.5f} and {ours[1]:.5f}, gradients apart {apart:.1e}",
            flush=True,
        )
    print(f"median {statistics.median(ratios):.2f}x, {statistics.median(speeds):.0f} tokens/s")


if __name__ == "__main__":
    main()
