"""Answering prompts with vLLM: engines without any part of capture, with CUDA graphs and prefix caching."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

from eagle3lab.engines.base import Answer, Sampling
from eagle3lab.engines.vllm_engine import EngineRunner, share_out
from eagle3lab.engines.vllm_settings import VllmSettings
from eagle3lab.verifier.facts import VerifierFacts

PER_RUNNER = 2048  # prompts of one request: several times what an engine decodes at once, for a short tail


class VllmAnswerer:
    """An `Answerer` over one or several runners of the same verifier."""

    name = "vllm"

    def __init__(self, runners: Sequence[EngineRunner], settings: VllmSettings, facts: VerifierFacts) -> None:
        self.facts = facts
        self.answers_at_once = PER_RUNNER * len(runners)
        self._runners = list(runners)
        self._settings = settings

    def versions(self) -> dict[str, str]:
        """vllm, torch, transformers, the compute dtype, the tensor-parallel size."""
        return self._runners[0].versions()

    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
    ) -> list[Answer]:
        """One answer per prompt; see `Answerer`. The prompts are shared out over the runners.

        Raises EngineError when there is none.
        """
        lengths = [len(p) + new for p, new in zip(prompts, max_new_tokens, strict=True)]
        if not all(prompts) or max(lengths, default=0) > self._settings.max_len:
            raise ValueError(f"prompts of 1 token at least, {self._settings.max_len} with their answers")
        ids = {token for prompt in prompts for token in prompt}
        if ids and not 0 <= min(ids) <= max(ids) < self.facts.vocab_size:
            raise ValueError(f"token ids outside 0..{self.facts.vocab_size - 1}")

        def ask(runner: EngineRunner, share: Sequence[int]) -> list[Answer]:
            if not share:
                return []
            some = [prompts[i] for i in share]
            return runner.answer(
                some, sampling, [seeds[i] for i in share], [max_new_tokens[i] for i in share]
            )

        shares = share_out(lengths, len(self._runners))
        answers: dict[int, Answer] = {}
        with ThreadPoolExecutor(len(self._runners)) as pool:
            for share, part in zip(shares, pool.map(ask, self._runners, shares), strict=True):
                answers |= dict(zip(share, part, strict=True))
        return [answers[i] for i in range(len(prompts))]

    def close(self) -> None:
        """End every runner, also when one of them fails to end."""
        runners, self._runners = self._runners, []
        with ExitStack() as stack:
            for runner in runners:
                stack.callback(runner.close)
