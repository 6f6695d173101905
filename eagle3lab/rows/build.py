"""Rows of a data configuration, with every conversation accounted for."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import DataConfig, ModelConfig, TooLong
from eagle3lab.rows.readers import read_conversations
from eagle3lab.rows.render import part_separator, template_arguments
from eagle3lab.rows.rows import (
    REASONS_WITHOUT_FAULT,
    Accounting,
    Conversation,
    Row,
    RowSet,
)
from eagle3lab.rows.split import TRAIN, num_prefixes, split_of
from eagle3lab.rows.tokenizer import (
    Tokenizer,
    is_other_tokenizer,
    load_tokenizer,
    special_tokens,
    template_args_hash,
    template_hash,
    tokenizer_hash,
)
from eagle3lab.rows.turns import RawRow, Rules, build_turns
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.trained_on import text_key

if TYPE_CHECKING:
    from eagle3lab.verifier.facts import VerifierFacts

CHUNK = 32  # conversations a worker takes at a time
CONVERSATIONS_PER_WORKER = 2000  # seconds of rendering, against seconds to start a process
MAX_WORKERS = 16


@dataclass(frozen=True)
class Recipe:
    """Everything, besides the tokenizer, that decides the rows of one conversation."""

    rules: Rules
    vocab_size: int
    max_len: int
    too_long: TooLong


@dataclass
class Built:
    """One conversation's rows, `(input_ids, loss_mask)` each, or the reason why it has none."""

    rows: list[tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    reason: str = ""
    detail: str = ""
    turns_dropped: Counter[str] = field(default_factory=Counter)
    repaired: Counter[str] = field(default_factory=Counter)
    noted: Counter[str] = field(default_factory=Counter)

    @property
    def num_tokens(self) -> int:
        return sum(len(ids) for ids, _ in self.rows)


def build_rows(
    data: DataConfig, model: ModelConfig, facts: VerifierFacts, *, num_workers: int | None = 0
) -> RowSet:
    """Read, render, mask, cap and split; the result is the same for any `num_workers`.

    `num_workers` counts processes beside this one; None starts as many as the data is worth.
    Rows come in the order of reading. A row holds at most `data.max_len` tokens and never more than
    the verifier has positions. Once the kept rows hold `data.max_tokens` tokens, the remaining
    conversations are counted as `beyond_max_tokens`.

    Raises UserError for unusable input, for the first faulty conversation with `data.strict`, and
    when no conversation gives a row.
    """
    tokenizer, recipe, conversations, account = read_for(data, model, facts)
    if num_workers is None:
        num_workers = worthwhile_workers(len(conversations))
    with _outcomes(conversations, tokenizer, recipe, model, facts.path, num_workers) as outcomes:
        return assemble_rows(conversations, outcomes, account, data, model, facts, tokenizer, recipe)


def read_for(
    data: DataConfig, model: ModelConfig, facts: VerifierFacts
) -> tuple[Tokenizer, Recipe, list[Conversation], Accounting]:
    """The conversations of `data` as the model's template takes them, and what their rows are made with.

    Raises UserError for unusable input, and for the first faulty conversation with `data.strict`.
    """
    tokenizer = load_tokenizer(model, facts.path)
    recipe = make_recipe(data, model, facts, tokenizer)
    conversations, account = read_conversations(data, part_separator(tokenizer, recipe.rules.arguments))
    refuse_faults(account, data.strict)
    prefixes = num_prefixes(conversations)
    if prefixes:
        account.noted["prefix_of_longer"] = prefixes
    return tokenizer, recipe, conversations, account


def assemble_rows(
    conversations: Sequence[Conversation],
    outcomes: Iterable[Built],
    account: Accounting,
    data: DataConfig,
    model: ModelConfig,
    facts: VerifierFacts,
    tokenizer: Tokenizer,
    recipe: Recipe,
) -> RowSet:
    """The rows of `outcomes`, one per conversation and in their order, split and accounted for.

    No outcome is taken beyond the conversation that fills `data.max_tokens`. Raises as `build_rows`.
    """
    rows: list[Row] = []
    user_turns: set[int] = set()
    num_tokens = 0
    taken = iter(outcomes)
    for position, conversation in enumerate(conversations):
        built = next(taken)
        if built.reason:
            account.drop(built.reason, conversation.record_id, built.detail)
            refuse_faults(account, data.strict)
            continue
        account.kept += 1
        account.add(built.turns_dropped, built.repaired, built.noted)
        split = split_of(conversation, data.validation_share, data.seed)
        rows += [_row(conversation, split, ids, mask) for ids, mask in built.rows]
        if split == TRAIN:
            user_turns |= {text_key(m["content"]) for m in conversation.messages if m["role"] == "user"}
        num_tokens += built.num_tokens
        if data.max_tokens is not None and num_tokens >= data.max_tokens:
            for left_out in conversations[position + 1 :]:
                account.drop("beyond_max_tokens", left_out.record_id)
            break
    account.rows = len(rows)
    if account.kept and is_other_tokenizer(model, facts.path):
        account.noted["tokenizer_not_beside_the_weights"] = account.kept
    assert account.balanced(), "a conversation was neither kept nor dropped"
    if not rows:
        raise UserError("no conversation became a row\n    " + "\n    ".join(account.lines()))
    return RowSet(
        rows=tuple(rows),
        user_turns=frozenset(user_turns),
        accounting=account,
        tokenizer_hash=tokenizer_hash(model, facts.path),
        template_hash=template_hash(tokenizer),
        template_args_hash=template_args_hash(tokenizer, model),
        end_token_ids=tuple(sorted(recipe.rules.end_token_ids)),
        max_len=recipe.max_len,
    )


def worthwhile_workers(num_conversations: int) -> int:
    """Processes that render faster than this one alone, their start included; 0 for few conversations."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(MAX_WORKERS, usable, num_conversations // CONVERSATIONS_PER_WORKER)
    return workers if workers > 1 else 0


def make_recipe(data: DataConfig, model: ModelConfig, facts: VerifierFacts, tokenizer: Tokenizer) -> Recipe:
    """The settings of one build; the end tokens are the verifier's and the tokenizer's together."""
    ends = {*facts.eos_token_ids, tokenizer.eos_token_id} - {None}
    return Recipe(
        rules=Rules(
            template_arguments(tokenizer, model),
            frozenset(ends),
            special_tokens(tokenizer),
            getattr(tokenizer, "bos_token_id", None),
        ),
        vocab_size=facts.vocab_size,
        max_len=min(data.max_len, facts.max_positions),
        too_long=data.too_long,
    )


def build_conversation(conversation: Conversation, tokenizer: Tokenizer, recipe: Recipe) -> Built:
    """Rows of one conversation, capped; a conversation without any has a reason instead."""
    turns = build_turns(tokenizer, conversation.messages, conversation.tools, recipe.rules)
    built = Built(
        detail=turns.detail, turns_dropped=turns.dropped, repaired=turns.repaired, noted=turns.noted
    )
    for row in turns.rows:
        add_row(built, row, recipe)
    if not built.rows:
        built.reason = main_reason(turns.dropped)
    return built


def add_row(built: Built, row: RawRow, recipe: Recipe) -> None:
    """Add one row, capped; spans that lie beyond the cap or outside the vocabulary are counted."""
    length = len(row.input_ids)
    if max(row.input_ids) >= recipe.vocab_size:
        built.turns_dropped["token_outside_vocabulary"] += len(row.spans)
        return
    if length > recipe.max_len:
        length = recipe.max_len if recipe.too_long is TooLong.truncate else 0
    kept = [(start, min(stop, length)) for start, stop in row.spans if start < length]
    if len(kept) < len(row.spans):
        built.turns_dropped["too_long"] += len(row.spans) - len(kept)
    if not kept:
        return
    if length < len(row.input_ids):
        built.repaired["truncated"] += 1
    mask = [0] * length
    for start, stop in kept:
        mask[start:stop] = [1] * (stop - start)
    built.rows.append((tuple(row.input_ids[:length]), tuple(mask)))


def main_reason(dropped: Counter[str]) -> str:
    """The most frequent reason of a conversation's turns; of equally frequent ones the first by name."""
    return min(dropped, key=lambda reason: (-dropped[reason], reason))


def _row(conversation: Conversation, split: str, ids: tuple[int, ...], mask: tuple[int, ...]) -> Row:
    return Row(row_id_of(ids, mask), conversation.conversation_id, conversation.source, split, ids, mask)


def refuse_faults(account: Accounting, strict: bool) -> None:
    """Raise UserError for the first conversation that was dropped for a fault of its own, if `strict`."""
    faults = [reason for reason in account.dropped if reason not in REASONS_WITHOUT_FAULT]
    if strict and faults:
        named = f"{account.examples[faults[0]][0]}: {faults[0]}"
        detail = account.details.get(faults[0])
        what = "data.strict=true and a conversation cannot be used"
        raise UserError(
            Problem(what, named + (f" ({detail})" if detail else ""), fix="data.strict=false counts it")
        )


@contextmanager
def _outcomes(
    conversations: list[Conversation],
    tokenizer: Tokenizer,
    recipe: Recipe,
    model: ModelConfig,
    path: Path,
    num_workers: int,
) -> Iterator[Iterable[Built]]:
    """Outcomes in the order of `conversations`, computed here or by a pool of processes."""
    if num_workers < 1:
        yield map(partial(build_conversation, tokenizer=tokenizer, recipe=recipe), conversations)
        return
    # Started afresh, not forked: tokenizers and torch keep threads that do not survive a fork.
    pool = ProcessPoolExecutor(
        num_workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(model, path, recipe),
    )
    try:
        yield pool.map(_work, conversations, chunksize=CHUNK)
    finally:
        pool.shutdown(cancel_futures=True)


_WORKER: list[Any] = []  # a worker process's own tokenizer and recipe


def _start_worker(model: ModelConfig, path: Path, recipe: Recipe) -> None:
    _WORKER[:] = [load_tokenizer(model, path), recipe]


def _work(conversation: Conversation) -> Built:
    return build_conversation(conversation, *_WORKER)
