"""The bare step loop that `train.py` is held against: forward, loss, backward, clip and AdamW on ready batches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from speculators.losses import resolve_loss_config
from synthetic import LAYER_IDS

from eagle3lab.config.schema import DraftConfig
from eagle3lab.draft.frozen import shrink_frozen
from eagle3lab.draft.pruned.heads import kl_with_gradient
from eagle3lab.draft.pruned.step import plan_batch, pruned_forward
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.weights import load_edge_weights

DRAFT_VOCABULARY = 32000


class BareLoop:
    """A draft and two packs of `seq_len` on the device; the second half of every document is supervised.

    step: "pruned" is our own, with the packs' plans made beforehand; "reference" is speculators' own compiled
    forward with its fused loss. Compiled once, timed as often as wanted.
    """

    def __init__(
        self, verifier: Path, ttt_steps: int, step: str, *, device: str, seq_len: int, document: int
    ) -> None:
        facts = read_facts(verifier)
        vocabulary = DraftVocabulary.from_ids(
            range(min(DRAFT_VOCABULARY, facts.vocab_size)), facts.vocab_size
        )
        self.on_cuda = device == "cuda"
        attention = "flex" if self.on_cuda else "sdpa"
        config, edge = DraftConfig(name="eagle3", ttt_steps=ttt_steps), load_edge_weights(facts)
        draft = build_draft(config, facts, edge, vocabulary, LAYER_IDS, attention=attention, seed=0)
        self.draft = draft.to(device).train()
        self.device, self.seq_len, self.document, self.ttt_steps = device, seq_len, document, ttt_steps
        self.trainable = [p for p in self.draft.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trainable, lr=1e-4, fused=True)
        self.batches = [self._batch(facts.hidden_size, facts.vocab_size) for _ in range(2)]
        self._loss = self._pruned() if step == "pruned" else self._reference()

    def _batch(self, hidden: int, vocab_size: int) -> dict[str, torch.Tensor]:
        place = torch.arange(self.seq_len, device=self.device)
        states = {"device": self.device, "dtype": torch.bfloat16 if self.on_cuda else torch.float32}
        return {
            "hidden_states": torch.randn(1, self.seq_len, len(LAYER_IDS) * hidden, **states),
            "verifier_last_hidden_states": torch.randn(1, self.seq_len, hidden, **states),
            "input_ids": torch.randint(10, vocab_size, (1, self.seq_len), device=self.device),
            "document_ids": (place // self.document)[None],
            "position_ids": (place % self.document + 1)[None],
            "loss_mask": (place % self.document >= self.document // 2)[None].long(),
        }

    def _pruned(self) -> Callable[[int], torch.Tensor]:
        if self.on_cuda:
            shrink_frozen(self.draft, torch.bfloat16)  # as `train.py` holds them
        loss = kl_with_gradient(compiled=self.on_cuda)
        plans = [plan_batch(self.draft, batch, self.ttt_steps).to(self.device) for batch in self.batches]

        def compute(i: int) -> torch.Tensor:
            output = pruned_forward(
                self.draft, self.batches[i], self.ttt_steps, loss, plan=plans[i], compiled=self.on_cuda
            )
            return (output.loss_sums / output.num_supervised).sum()

        return compute

    def _reference(self) -> Callable[[int], torch.Tensor]:
        if self.on_cuda:
            import speculators.losses.fused as fused

            # traced inside the compiled forward, the fused loss fails in dynamo
            fused.fused_kl_div_loss = torch.compiler.disable(fused.fused_kl_div_loss)
        loss_config = resolve_loss_config("kl_div", "fused" if self.on_cuda else "eager")

        def compute(i: int) -> torch.Tensor:
            return self.draft(**self.batches[i], ttt_steps=self.ttt_steps, loss_config=loss_config)[1]

        return compute

    def _step(self, i: int) -> None:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.on_cuda):
            loss = self._loss(i)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.trainable, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def tokens_per_second(self, updates: int) -> float:
        """Of the median step, each waited for."""
        seconds = []
        for i in range(updates + 3):
            self._wait()
            start = time.perf_counter()
            self._step(i % 2)
            self._wait()
            seconds.append(time.perf_counter() - start)
        return self.seq_len / statistics.median(seconds[3:])
