"""Real acceptance of a draft that is still in training: the same prompts at every call, by greedy decoding."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import HardwareConfig, ModelConfig, PromptsConfig
from eagle3lab.config.selection import AcceptanceConfig
from eagle3lab.data.domains import Domains
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.select import DTYPES, pick_device
from eagle3lab.evaluate.acceptance import AcceptanceCounts
from eagle3lab.evaluate.decoder import decode_with_draft, prefill
from eagle3lab.evaluate.overlap import check_overlap
from eagle3lab.evaluate.prompts import read_prompts
from eagle3lab.rows.render import render_prompt
from eagle3lab.rows.tokenizer import Tokenizer, load_tokenizer
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import VerifierFacts


@dataclass(frozen=True)
class DraftMeter:
    """A verifier, a draft of its own to put weights into, and prompts. Touches nothing of a training."""

    engine: HuggingFaceEngine
    draft: Any
    prompts: tuple[tuple[int, ...], ...]
    k: int
    max_new_tokens: int
    end_ids: frozenset[int]
    description: str

    def measure(self, weights: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...]]:
        """Decode every prompt with these trained weights, by their names in the draft.

        Returns the verification steps and in how many of them the drafted token at position 0, 1, ... k-1 was
        accepted. A step counts in full, as in `AcceptanceCounts`.
        """
        with _same_random_numbers(self.engine.model.device), torch.no_grad():
            own = {name: p for name, p in self.draft.named_parameters() if p.requires_grad}
            assert own.keys() == weights.keys(), f"{own.keys() ^ weights.keys()}"
            for name, parameter in own.items():
                parameter.copy_(weights[name])
            total = AcceptanceCounts(0, (0,) * self.k)
            for prompt in self.prompts:
                total += self._decode(prompt)
        return total.drafts, total.accepted_at

    def _decode(self, prompt: Sequence[int]) -> AcceptanceCounts:
        session = self.engine.session(self.draft.config.eagle_aux_hidden_state_layer_ids)
        room = self.engine.facts.max_positions - len(prompt) - self.k - 1
        decoded = decode_with_draft(
            session,
            prefill(session, prompt),
            partial(ChainDrafter, self.draft),
            self.k,
            min(self.max_new_tokens, room),
            self.end_ids,
        )
        return AcceptanceCounts.from_steps(decoded.accepted, self.k)


def open_meter(
    settings: AcceptanceConfig,
    *,
    model: ModelConfig,
    hardware: HardwareConfig,
    facts: VerifierFacts,
    store: StoreReader,
    draft: nn.Module,
    ttt_steps: int,
) -> DraftMeter:
    """Load the verifier once, in the precision that is trained in, beside a `draft` that nobody else uses.

    draft: as `build_draft` makes it for sdpa; only its trained weights are ever replaced. Raises UserError when
    there is no prompt that fits, or none that the store's rows are not trained on.
    """
    started = time.perf_counter()
    device, dtype = pick_device(hardware), DTYPES[hardware.precision]
    with _same_random_numbers(torch.device(device)):
        engine = HuggingFaceEngine(facts.path, facts, dtype, device, model.trust_remote_code)
    draft = draft.to(device).eval()
    for parameter in draft.parameters():  # `draft.to(dtype)` would also cast rotary frequencies
        parameter.data = parameter.data.to(dtype)
    tokenizer = load_tokenizer(model, facts.path)
    k = settings.k or ttt_steps
    longest = facts.max_positions - k - 2  # the last verification step may reach beyond the budget
    if settings.prompts is None:
        prompts, note = validation_prompts(store, settings.num_prompts, longest), None
    else:
        prompts, note = _prompts_of_file(settings, store, tokenizer, model, longest)
    if not prompts:
        raise UserError(
            Problem(
                "no prompt to measure acceptance with",
                settings.prompts or f"validation rows of {store.path}",
                f"one of at most {longest} tokens",
                "train.acceptance.prompts=FILE, or train.acceptance.every_updates=null",
            )
        )
    text = (
        f"  real acceptance    every {settings.every_updates:,} updates over {len(prompts)} prompts "
        f"({'served prompts of validation rows' if settings.prompts is None else settings.prompts}), k={k}, up to "
        f"{settings.max_new_tokens} new tokens each; verifier loaded in {time.perf_counter() - started:.1f} s"
    )
    end_ids = frozenset({*facts.eos_token_ids, tokenizer.eos_token_id} - {None})
    return DraftMeter(
        engine, draft, prompts, k, settings.max_new_tokens, end_ids, f"{text}\n{note}" if note else text
    )


def validation_prompts(store: StoreReader, num_prompts: int, longest: int) -> tuple[tuple[int, ...], ...]:
    """Served prompts of validation rows, which no draft of the store is trained on; one of a conversation.

    The domains take turns, each in the store's order. Longer and repeated prompts are passed over.
    """
    rows = store.indices("validation")
    given, order = Counter[int](), list[tuple[int, int, int]]()
    conversations = set[str]()
    for row, domain in zip(rows, Domains.of([store.rows[i].source for i in rows]).of_row, strict=True):
        if store.rows[row].conversation_id not in conversations:
            conversations.add(store.rows[row].conversation_id)
            order.append((given[domain], domain, row))
            given[domain] += 1
    found: dict[tuple[int, ...], None] = {}
    for _, _, row in sorted(order):
        if len(found) == num_prompts:
            break
        ids, mask = store.read_tokens(row)
        prompt = tuple(ids[: int(mask.argmax())].tolist())  # empty where nothing is supervised
        if 0 < len(prompt) <= longest:
            found[prompt] = None
    return tuple(found)


def _prompts_of_file(
    settings: AcceptanceConfig, store: StoreReader, tokenizer: Tokenizer, model: ModelConfig, longest: int
) -> tuple[tuple[tuple[int, ...], ...], str | None]:
    """Those that fit, and what is to be said of them."""
    chosen = PromptsConfig(
        name="train.acceptance.prompts",
        path=settings.prompts,
        max_prompts=settings.num_prompts,
        leave_out_trained_on=True,
    )
    rendered = [(p, render_prompt(tokenizer, list(p.messages), model)) for p in read_prompts(chosen)]
    kept, overlap = check_overlap(store.path, rendered, chosen)
    fitting = tuple(tuple(ids) for _, ids in kept if len(ids) <= longest)
    notes = [overlap.note] if overlap.note else []
    if len(fitting) < len(kept):
        notes.append(f"{len(kept) - len(fitting)} prompts of more than {longest} tokens are left out")
    return fitting, "\n".join(f"  {note}" for note in notes) or None


@contextmanager
def _same_random_numbers(device: torch.device) -> Iterator[None]:
    """Whatever is drawn within, torch draws afterwards what it would have drawn."""
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield
