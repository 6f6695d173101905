"""`data.regenerate`: the verifier answers the user turns itself, and rows are made of the ids it generated.

Answers first, states second: a request ends before the last token that it generated was fed back, so that
one has no state yet, and rows need one for every token. The capture is a prefill of the finished rows.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import DataConfig, ExtractorConfig, HardwareConfig, ModelConfig
from eagle3lab.config.value_text import as_typed
from eagle3lab.engines.base import Answerer, EngineError, Sampling
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.select import DTYPES, build_answerer, pick_device
from eagle3lab.extract.answer_book import AnswerBook
from eagle3lab.extract.answering import answer_conversations
from eagle3lab.extract.capture import timed
from eagle3lab.extract.generated import Generated
from eagle3lab.extract.progress import CaptureProgress, say
from eagle3lab.extract.report import ExtractReport, append_log, lost_answers_error
from eagle3lab.rows.build import Built, Recipe, assemble_rows, read_for
from eagle3lab.rows.dialogue import Dialogue
from eagle3lab.rows.rows import Conversation, RowSet, canonical_json, sha256_text
from eagle3lab.rows.tokenizer import (
    Tokenizer,
    template_args_hash,
    template_hash,
    tokenizer_hash,
)
from eagle3lab.store.answers import ANSWERS_FILE, REGENERATED, Header
from eagle3lab.store.claim import claimed, remove_leftovers
from eagle3lab.store.files import write_atomically
from eagle3lab.store.manifest import is_store, read_manifest
from eagle3lab.verifier.facts import VerifierFacts, weight_fingerprint


@dataclass(frozen=True)
class Regenerated:
    """Rows of generated ids, and what the manifest says of them."""

    rowset: RowSet
    row_settings: dict[str, Any]
    generated: Generated


def regenerate_rows(
    *,
    model: ModelConfig,
    data: DataConfig,
    extract: ExtractorConfig,
    hardware: HardwareConfig,
    facts: VerifierFacts,
    store: Path,
    console: Console,
    seconds: dict[str, float],
) -> Regenerated:
    """Answer every conversation, or take the answers that lie in `store`, and make the rows.

    With `extract.num_parts` the answers lie in the directory of the whole store: part 0 generates them and
    every part captures its own share of the rows. No engine is started when no answer is missing.

    Raises:
        UserError: unusable input, answers made under other settings, conversations that the engine failed on
            (by id), the engine is gone, no rows.
        IntegrityError: damaged answers, or answers that are not those of the store.
    """
    with timed(seconds, "rows"):
        tokenizer, recipe, conversations, account = read_for(data, model, facts)
        header = _header(model, data, facts, tokenizer, recipe, conversations)
    with ExitStack() as stack:
        if extract.part == 0:
            for note in (*stack.enter_context(claimed(store)), *remove_leftovers(store)):
                say(console, note)
        book = AnswerBook(store, header, owner=extract.part == 0, console=console)
        generated = Generated(num_known=len(book.by_key))

        def begin(conversation: Conversation) -> Dialogue:
            return book.replay(Dialogue(conversation, tokenizer, recipe, data.sampling.max_new_tokens))

        def start() -> Answerer:
            request = EngineRequest(
                facts.path,
                facts,
                model,
                DTYPES[hardware.precision],
                pick_device(hardware),
                max_len=recipe.max_len,
                batch_tokens=extract.batch_tokens,
                parallel=hardware.engine,
            )
            with timed(seconds, "load"):
                return book.open(lambda: build_answerer(extract.backend, request))

        try:
            with CaptureProgress(
                console,
                len({c.conversation_id for c in conversations}),
                what="generate",
                unit="conversations",
            ) as progress:
                dialogues = answer_conversations(
                    conversations,
                    begin,
                    start,
                    book.keep,
                    sampling_of(data, recipe),
                    seed=data.sampling.seed,
                    vocab_size=facts.vocab_size,
                    max_tokens=data.max_tokens,
                    generated=generated,
                    seconds=seconds,
                    progress=progress,
                )
        except EngineError as error:
            raise UserError(
                Problem(
                    f"the engine failed while it generated answers: {error}",
                    expected="an answer to every user turn",
                    fix=f"the same command again: what is in {store / ANSWERS_FILE} is not generated again",
                )
            ) from error
        if generated.lost:
            report = ExtractReport(store, 0, 0, 0, seconds=seconds, lost=generated.lost, generated=generated)
            append_log(report)
            raise lost_answers_error(report, len(conversations))
        used: dict[str, Dialogue] = {}

        def outcomes() -> Iterator[Built]:
            for conversation in conversations:
                used[conversation.conversation_id] = dialogues[conversation.conversation_id]
                yield used[conversation.conversation_id].built

        rowset = assemble_rows(conversations, outcomes(), account, data, model, facts, tokenizer, recipe)
        settings = book.close(list(used))
    return Regenerated(rowset, settings, generated)


def refuse_other_kind(store: Path, regenerate: bool) -> None:
    """Raise UserError when `store` was begun with the other value of `data.regenerate`."""
    if is_store(store):
        stored = bool(read_manifest(store).row_settings.get(REGENERATED))
    else:
        stored = (store / ANSWERS_FILE).exists() or regenerate
    if stored != regenerate:
        raise UserError(
            Problem(
                f"{store} was begun with data.regenerate={as_typed(stored)}",
                expected=f"data.regenerate={as_typed(regenerate)} as now",
                fix="store=ANOTHER_DIRECTORY, or delete this one, or undo the change",
            )
        )


def copy_answers(whole: Path, part: Path) -> None:
    """Put the answers beside the part's states: a part says by itself what its rows are made of."""
    with claimed(part):
        write_atomically(part / ANSWERS_FILE, lambda path: shutil.copyfile(whole / ANSWERS_FILE, path))


def sampling_of(data: DataConfig, recipe: Recipe) -> Sampling:
    """What the engine is told; answers end at the verifier's and the tokenizer's end tokens."""
    s = data.sampling
    return Sampling(s.temperature, s.top_p, s.top_k, tuple(sorted(recipe.rules.end_token_ids)))


def _header(
    model: ModelConfig,
    data: DataConfig,
    facts: VerifierFacts,
    tokenizer: Tokenizer,
    recipe: Recipe,
    conversations: Sequence[Conversation],
) -> Header:
    """Everything, but the engine, that decides the answers."""
    stops = list(sampling_of(data, recipe).stop_token_ids)
    sampling = {**asdict(data.sampling), "stop_token_ids": stops}
    return {
        "verifier": {"config_hash": facts.config_hash, "weight_fingerprint": weight_fingerprint(facts.path)},
        "tokenizer_hash": tokenizer_hash(model, facts.path),
        "template_hash": template_hash(tokenizer),
        "template_args_hash": template_args_hash(tokenizer, model),
        "sampling": sampling,
        "sampling_hash": sha256_text(canonical_json(sampling)),
        "max_len": recipe.max_len,
        "max_tokens": data.max_tokens,
        "num_conversations": len(conversations),
        "conversations_hash": sha256_text("\n".join(c.conversation_id for c in conversations)),
    }
