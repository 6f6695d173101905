"""The vLLM backend: capture by vLLM's own `extract_hidden_states`, and a second opinion by hooks.

vLLM writes every row's states to a file in memory, together with the token ids they belong to. Here the
files are read, held against the request and removed. Imports no vllm: the engines themselves are
`EngineRunner`s, one in this process or several in processes of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load_file

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.engines.base import Answer, Recording, Sampling, States, check_states
from eagle3lab.engines.vllm_decode import DecodedPass, DecodeRequest
from eagle3lab.engines.vllm_files import Scratch, drop_file, drop_files, take_file, to_states
from eagle3lab.engines.vllm_settings import VllmSettings
from eagle3lab.engines.vllm_worker import POST_NORM, PRE_NORM, TOKEN_IDS, layer_key
from eagle3lab.verifier.facts import VerifierFacts

CALLS_PER_RUNNER = 6  # some wait in the engine's queue while the states of others are read; see `turns`
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class EngineRunner(Protocol):
    """One engine that answers with files; see `engines.vllm.VllmRunner`."""

    def versions(self) -> dict[str, str]: ...
    def ask(self, rows: Sequence[Sequence[int]]) -> list[str]: ...
    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> tuple[list[int], str | None]: ...
    def answer(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        seeds: Sequence[int],
        max_new_tokens: Sequence[int],
    ) -> list[Answer]: ...
    def record(self, row: Sequence[int], layer_ids: Sequence[int], path: str) -> list[str]: ...
    def close(self) -> None: ...


class DecodingRunner(Protocol):
    """One engine that decodes with a draft or without one; see `engines.vllm.VllmRunner`."""

    def versions(self) -> dict[str, str]: ...
    def decode(
        self, requests: Sequence[DecodeRequest], temperature: float, at_once: int, end_ids: Collection[int]
    ) -> DecodedPass: ...
    def top_logits(self, rows: Sequence[Sequence[int]]) -> list[dict[int, float]]: ...
    def close(self) -> None: ...


class VllmEngine:
    """An `Engine` over one or several runners of the same verifier."""

    name = "vllm"
    pads = False

    def __init__(
        self, runners: Sequence[EngineRunner], settings: VllmSettings, facts: VerifierFacts, scratch: Scratch
    ) -> None:
        self.facts = facts
        self._runners = list(runners)
        self.concurrency = CALLS_PER_RUNNER * len(self._runners)
        self._settings = settings
        self._scratch = scratch

    def versions(self) -> dict[str, str]:
        """vllm, torch, transformers, the compute dtype, the tensor-parallel size."""
        return self._runners[0].versions()

    def capture(self, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States]:
        """States of every row, on the CPU, in the compute dtype; every one is checked.

        Raises:
            ValueError: an empty or too long row, a token id outside the vocabulary, a layer id that the
                engine was not started with.
            EngineError: no answer for a row.
            IntegrityError: states of other tokens, layers or shapes, not finite, or zero.
            UserError: a row's states do not fit into the scratch directory.
        """
        self._check(rows, layer_ids)
        lengths = [len(row) for row in rows]
        bytes_per_token = (
            len(self._settings.layer_ids) * self.facts.hidden_size * DTYPES[self._settings.dtype].itemsize
            + 16
        )
        states: list[States] = []
        copied = False
        while len(states) < len(rows):
            with self._scratch.room_for(lengths[len(states) :], bytes_per_token) as count:
                asked = rows[len(states) : len(states) + count]
                # states that map their files would leave the later rows no room
                copied |= len(states) + count < len(rows)
                states += self._read(self._ask(asked), asked, layer_ids, copied=copied)
        return states

    def _read(
        self, files: Sequence[str], rows: Sequence[Sequence[int]], layer_ids: Sequence[int], *, copied: bool
    ) -> list[States]:
        """The checked states in `files`, which are removed whatever happens; `copied` out of them, or mapped."""

        states = []
        try:
            for file, row in zip(files, rows, strict=True):
                tensors = take_file(Path(file), self._settings.answer_seconds(len(row)))
                found = to_states(tensors, self._settings.layer_ids, layer_ids, self.facts.hidden_size)
                check_states(found, row, len(layer_ids), self.facts.hidden_size)
                if copied:
                    found = States(found.token_ids.clone(), found.aux.clone(), found.last.clone())
                states.append(found)
        except BaseException:
            drop_files(files)
            raise
        return states

    def record(self, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[Recording]:
        """The second opinion: decoder layers `layer_ids` and both sides of the final norm, by our own hooks.

        Raises:
            ValueError, EngineError: as `capture`.
            IntegrityError: the hooks saw other tokens, or not every layer once per token.
        """
        if not all(1 <= k <= self.facts.num_layers for k in layer_ids):
            raise ValueError(f"layer ids {list(layer_ids)} outside 1..{self.facts.num_layers}")
        self._check(rows, ())
        return [self._record(row, layer_ids) for row in rows]

    def generate(self, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
        """Greedy continuation; ends after an end-of-sequence id, which is included."""
        max_new_tokens = min(max_new_tokens, self._settings.max_len + 1 - len(prompt))
        if max_new_tokens < 1:
            return []
        self._check([prompt], ())
        tokens, file = self._runners[0].generate(prompt, max_new_tokens)
        if file is not None:
            take_file(Path(file), self._settings.answer_seconds(len(prompt)))
        return tokens

    def close(self) -> None:
        """End every runner and remove the scratch directory, also when one of them fails to end."""
        runners, self._runners = self._runners, []
        with ExitStack() as stack:
            stack.callback(self._scratch.close)
            for runner in runners:
                stack.callback(runner.close)

    def _ask(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The files of the rows' states, the rows shared out over the runners by their tokens.

        When one runner fails, the files of the others are removed: nobody will read them.
        """
        if len(self._runners) == 1:
            return self._runners[0].ask(rows)
        shares = [share for share in share_out([len(row) for row in rows], len(self._runners)) if share]
        with ThreadPoolExecutor(len(self._runners)) as pool:
            answers = [
                pool.submit(runner.ask, [rows[i] for i in share])
                for runner, share in zip(self._runners, shares, strict=False)
            ]
        errors = [error for answer in answers if (error := answer.exception())]
        if errors:
            for answer in answers:
                for file in () if answer.exception() else answer.result():
                    drop_file(Path(file))
            raise errors[0]
        files: list[str] = [""] * len(rows)
        for answer, share in zip(answers, shares, strict=True):
            for i, file in zip(share, answer.result(), strict=True):
                files[i] = file
        return files

    def _record(self, row: Sequence[int], layer_ids: Sequence[int]) -> Recording:
        path = self._scratch.path / "recording.safetensors"
        for file in self._runners[0].record(row, layer_ids, str(path)):
            take_file(Path(file), self._settings.answer_seconds(len(row)))
        try:
            tensors = load_file(path)
        finally:
            path.unlink(missing_ok=True)
        names = [PRE_NORM, POST_NORM, *(layer_key(k) for k in layer_ids)]
        shapes = {name: tuple(tensors[name].shape) if name in tensors else None for name in names}
        wrong = {n: s for n, s in shapes.items() if s != (len(row), self.facts.hidden_size)}
        ids = tensors.get(TOKEN_IDS, torch.empty(0)).tolist()
        if wrong or ids != list(row):
            raise IntegrityError(
                Problem(
                    "the hooks in vLLM's workers did not see what was asked for",
                    wrong or f"{len(ids)} other token ids",
                    f"{len(row)} tokens, {len(names)} states of width {self.facts.hidden_size}",
                    "extract.backend=hf, or another release of vllm",
                )
            )
        return Recording(
            tensors[TOKEN_IDS].to(torch.int64),
            {k: tensors[layer_key(k)] for k in layer_ids},
            tensors[PRE_NORM],
            tensors[POST_NORM],
        )

    def _check(self, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> None:
        longest = self._settings.max_len
        if not rows or any(not 1 <= len(row) <= longest for row in rows):
            raise ValueError(f"rows must have 1 to {longest} tokens, as the engine was started for")
        if min(map(min, rows)) < 0 or max(map(max, rows)) >= self.facts.vocab_size:
            raise ValueError(f"token ids outside 0..{self.facts.vocab_size - 1}")
        if not set(layer_ids) <= set(self._settings.layer_ids):
            raise ValueError(
                f"layer ids {list(layer_ids)}, the engine captures {list(self._settings.layer_ids)}"
            )


def share_out(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Positions for every share: the next longest row to the share with the fewest tokens, in row order."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    tokens = [0] * num_shares
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = tokens.index(min(tokens))
        shares[least].append(i)
        tokens[least] += lengths[i]
    return [sorted(share) for share in shares]
