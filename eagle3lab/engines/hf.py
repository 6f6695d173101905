"""The Hugging Face backend: any causal language model that transformers loads, on one device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import transformers

from eagle3lab.engines.base import Answer, Sampling, States
from eagle3lab.engines.load import find_layers, load_causal_lm
from eagle3lab.engines.sampling import draw
from eagle3lab.engines.session import VerifierSession, record_layer_outputs
from eagle3lab.verifier.facts import VerifierFacts


class HuggingFaceEngine:
    """An `Engine` that captures by forward hooks on the decoder layers.

    Rows of one batch are padded on the right and no attention mask is passed: under causal attention a
    real token never sees a later position, so padding cannot reach a state. The head is not run.
    """

    name = "hf"
    pads = True
    concurrency = 1
    answers_at_once = 8  # they are answered one after the other: this only bounds what a kill can cost

    def __init__(
        self,
        path: Path,
        facts: VerifierFacts,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        trust_remote_code: bool = False,
    ) -> None:
        self.facts = facts
        self.model = load_causal_lm(
            path, num_layers=facts.num_layers, dtype=dtype, device=device, trust_remote_code=trust_remote_code
        )
        self._inner, self._layers = find_layers(self.model, facts.num_layers)

    def versions(self) -> dict[str, str]:
        """torch, transformers, the compute dtype and the attention kernel."""
        return {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "attention": str(self.model.config._attn_implementation),
        }

    def capture(self, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States]:
        """States of every row, on the CPU, in the model's dtype.

        Raises:
            ValueError: an empty row, a token id outside the vocabulary, a layer id outside 1..num_layers.
        """
        num_layers = self.facts.num_layers
        if not rows or any(not row for row in rows):
            raise ValueError("capture needs rows of at least one token")
        if min(map(min, rows)) < 0 or max(map(max, rows)) >= self.facts.vocab_size:
            raise ValueError(f"token ids outside 0..{self.facts.vocab_size - 1}")
        if not all(1 <= k <= num_layers for k in layer_ids):
            raise ValueError(f"layer ids {list(layer_ids)} outside 1..{num_layers}")
        width = max(map(len, rows))
        ids = torch.zeros(len(rows), width, dtype=torch.int64)  # padding id 0: any id does
        for i, row in enumerate(rows):
            ids[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
        with (
            torch.inference_mode(),
            record_layer_outputs(self._layers, sorted({*layer_ids, num_layers})) as recorded,
        ):
            self._inner(input_ids=ids.to(self.model.device), use_cache=False)
        # outside of inference mode and joined or cloned: ordinary tensors that share memory with nothing
        result = []
        for i, row in enumerate(rows):
            n = len(row)
            slots = [recorded[k][i, :n] for k in layer_ids]  # shape of each: [n, hidden_size]
            last = recorded[num_layers][i, :n]
            aux = torch.cat(slots, dim=-1) if slots else last.new_empty(n, 0)
            result.append(States(ids[i, :n].clone(), aux.cpu(), last.clone().cpu()))
        return result

    def session(self, layer_ids: Sequence[int]) -> VerifierSession:
        """A fresh sequence to decode step by step."""
        return VerifierSession(self.model, self._layers, layer_ids)

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy continuation with a KV cache; ends after an end-of-sequence id, which is included.

        Never goes beyond the verifier's positions, whatever `max_new_tokens` says.
        """
        max_new_tokens = min(max_new_tokens, self.facts.max_positions - len(prompt))
        session = self.session(())
        generated: list[int] = []
        tokens = list(prompt)
        while len(generated) < max_new_tokens:
            step = session.forward(tokens, num_logits=1, states=False)
            tokens = [int(step.logits[-1].argmax())]
            generated += tokens
            if tokens[0] in self.facts.eos_token_ids:
                break
        return generated

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
    ) -> list[Answer]:
        """One answer per prompt; see `Answerer`. A prompt's answer does not depend on those beside it."""
        requests = list(zip(prompts, seeds, max_new_tokens, strict=True))
        if any(not prompt or len(prompt) + new > self.facts.max_positions for prompt, _, new in requests):
            raise ValueError(f"prompts of 1 token at least, with {self.facts.max_positions} positions in all")
        return [self._answer(prompt, sampling, seed, new) for prompt, seed, new in requests]

    def _answer(self, prompt: Sequence[int], sampling: Sampling, seed: int, max_new_tokens: int) -> Answer:
        session = self.session(())
        generator = torch.Generator().manual_seed(seed)
        generated: list[int] = []
        tokens = list(prompt)
        while len(generated) < max_new_tokens:
            step = session.forward(tokens, num_logits=1, states=False)
            tokens = [draw(step.logits[-1], sampling, generator)]
            generated += tokens
            if tokens[0] in sampling.stop_token_ids:
                return Answer(tuple(generated), ended=True)
        return Answer(tuple(generated), ended=False)

    def close(self) -> None:
        """Free the verifier's memory."""
        del self.model, self._inner, self._layers
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
