"""What a served draft proposes, step by step: by vLLM, as its drafter is asked, and by the reference drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lab.config.schema import ModelConfig
from eagle3lab.draft.export import load_draft
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.vllm_decode import DecodeRequest
from eagle3lab.engines.vllm_settings import Decoding
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.weights import load_edge_weights


@dataclass
class Text:
    """One decoded text: the tokens of every step and what was proposed after it."""

    steps: list[tuple[int, ...]]
    logits: list[Tensor]  # one per step; shape: [k, vocab_size], -inf outside of the draft's vocabulary


@dataclass(frozen=True)
class Agreement:
    """The proposals of both along vLLM's texts."""

    num_proposals: int  # tokens
    num_equal: int
    largest_difference: float  # of a logit
    largest_logit: float
    same_texts: bool  # vLLM's greedy texts are the verifier's own

    @property
    def holds(self) -> bool:
        return self.num_equal == self.num_proposals > 0 and self.same_texts


def agreement(
    path: Path, draft: Path, prompts: Sequence[Sequence[int]], texts: Sequence[Text], *, budget: int
) -> Agreement:
    """Hold every proposal along texts that vLLM decoded greedily against the reference, in fp32 on the CPU.

    Not in a process in which vLLM has run layers of transformers: it changes their classes.
    """
    facts = read_facts(path)
    verifier = HuggingFaceEngine(path, facts)
    module = load_draft(draft, facts, load_edge_weights(facts)).eval()
    count = equal = 0
    difference = largest = 0.0
    same = True
    for prompt, text in zip(prompts, texts, strict=True):
        wanted = proposed_by_reference(verifier, module, prompt, text)
        tokens = [token for step in text.steps for token in step]
        own = verifier.generate(prompt, budget)  # ends with the end token, which vLLM is not told of
        same &= tokens[: len(own)] == own
        for ours, theirs in zip(text.logits, wanted, strict=True):
            finite = ours.isfinite()
            assert torch.equal(finite, theirs.isfinite())
            count += len(ours)
            equal += int((ours.argmax(-1) == theirs.argmax(-1)).sum())
            difference = max(difference, float((ours - theirs)[finite].abs().max()))
            largest = max(largest, float(theirs[finite].abs().max()))
    return Agreement(count, equal, difference, largest, same)


def drafted_by_vllm(
    path: Path, draft: Path, prompts: Sequence[Sequence[int]], *, k: int, budget: int
) -> list[Text]:
    """One text at a time; the logits are recorded where vLLM's drafter computes them."""
    from eagle3lab.engines.vllm_start import start_vllm_decoder

    facts = read_facts(path)
    longest = max(map(len, prompts)) + budget + 2 * k + 2
    request = EngineRequest(
        path, facts, ModelConfig(name="test"), torch.float32, "cpu", max_len=longest, batch_tokens=longest
    )
    runner: Any = start_vllm_decoder(request, Decoding(1, draft, k))
    texts = []
    try:
        core = runner._llm.llm_engine.engine_core.engine_core
        drafter = core.model_executor.driver_worker.worker.model_runner.drafter
        compute, seen = drafter.model.compute_logits, list[Tensor]()

        def recorded(hidden: Tensor, *args: Any) -> Tensor:
            logits = compute(hidden, *args)
            seen.append(logits.detach().float().clone())
            return logits

        drafter.model.compute_logits = recorded
        for prompt in prompts:
            seen.clear()
            found = runner.decode([DecodeRequest(tuple(prompt), budget, 0)], 0.0, 1, ())
            whole = torch.cat(seen)  # shape: [steps * k, vocab_size]; the engine's drain drafts a few more
            steps = list(found.texts[0].steps)
            texts.append(Text(steps, list(whole.split(k))[: len(steps)]))
    finally:
        runner.close()
    return texts


def proposed_by_reference(
    verifier: HuggingFaceEngine, module: Any, prompt: Sequence[int], text: Text
) -> list[Tensor]:
    """Logits `[k, vocab_size]` of the chain after each step of `text`, from the verifier's states of it."""
    drafter = ChainDrafter(module)
    ids = list(module.config.eagle_aux_hidden_state_layer_ids)
    tokens, found = list(prompt), []
    (states,) = verifier.capture([[*prompt, *(t for step in text.steps for t in step)]], ids)
    for step, logits in zip(text.steps, text.logits, strict=True):
        begun = drafter.num_pairs
        tokens += step
        drafter.extend(states.aux[begun : len(tokens) - 1], torch.tensor(tokens[begun + 1 :]))
        found.append(_widened(module, drafter.propose_with_logits(len(logits))[1]))
    return found


def _widened(module: Any, logits: Tensor) -> Tensor:
    """Over the verifier's vocabulary, as vLLM's are."""
    if module.t2d is None:
        return logits
    wide = logits.new_full((len(logits), module.t2d.shape[0]), float("-inf"))
    wide[:, module.t2d.cpu()] = logits
    return wide
