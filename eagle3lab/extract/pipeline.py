"""Conversations -> rows -> engine -> checks -> store."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import (
    Backend,
    DataConfig,
    ExtractorConfig,
    HardwareConfig,
    LastState,
    ModelConfig,
)
from eagle3lab.engines.base import Engine, EngineError
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.select import DTYPES, build_engine, pick_backend, pick_device
from eagle3lab.extract.capture import capture_shards, timed
from eagle3lab.extract.disk_need import describe_disk, disk_bytes, state_bytes
from eagle3lab.extract.progress import CaptureProgress, say
from eagle3lab.extract.reference import Reference, reference_forward
from eagle3lab.extract.regenerate import Regenerated, copy_answers, refuse_other_kind, regenerate_rows
from eagle3lab.extract.report import ExtractReport, append_log, lost_rows_error
from eagle3lab.extract.second_opinion import reference_fits
from eagle3lab.extract.self_test import MAX_TOKENS, sample_indices, self_test_capture
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import Row, RowSet
from eagle3lab.rows.sample import describe_sample
from eagle3lab.rows.tokenizer import load_tokenizer
from eagle3lab.store.claim import refuse_foreign
from eagle3lab.store.disk import check_free_space
from eagle3lab.store.manifest import Manifest, VerifierIdentity, is_store, read_manifest
from eagle3lab.store.merge import part_directory
from eagle3lab.store.plan import rows_of_part
from eagle3lab.store.shards import DTYPES as STATE_DTYPES
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import VerifierFacts, read_facts, weight_fingerprint
from eagle3lab.verifier.locate import locate_verifier
from eagle3lab.verifier.shapes import layer_ids_of


def extract_store(
    *,
    model: ModelConfig,
    data: DataConfig,
    extract: ExtractorConfig,
    hardware: HardwareConfig,
    store: Path,
    console: Console | None = None,
) -> ExtractReport:
    """Write the hidden states of every row to `store`, or go on where an earlier run stopped.

    A complete store of the same plan is recognised before any model is loaded.
    Raises:
        UserError: unusable input, no rows, too little disk, a store of something else.
        IntegrityError: the engine's states are not the verifier's.
    """
    console = console or Console()
    seconds: dict[str, float] = {}
    with timed(seconds, "fetch"):
        path = locate_verifier(model)
    facts = read_facts(path)
    layer_ids = layer_ids_of(extract.layer_ids, "extract.layer_ids", model, facts.num_layers)
    whole, store = store, part_directory(store, extract.part, extract.num_parts)
    for directory in dict.fromkeys((store, whole)):
        refuse_foreign(directory)
        refuse_other_kind(directory, data.regenerate)
    rowset, regenerated = _make_rows(model, data, extract, hardware, facts, whole, console, seconds)
    if regenerated and store != whole:
        copy_answers(whole, store)
    manifest = plan_manifest(model, facts, rowset, layer_ids, extract.dtype.value, extract.last_state)
    manifest = replace(manifest, part=extract.part, num_parts=extract.num_parts)
    if regenerated:
        manifest.row_settings |= regenerated.row_settings
    own = rows_of_part(rowset.rows, extract.shard_tokens, extract.part, extract.num_parts)
    num_tokens = sum(len(row.input_ids) for row in own)
    report = ExtractReport(store, len(own), num_tokens, state_bytes(own, manifest), seconds=seconds)
    report.generated = regenerated.generated if regenerated else None
    if extract.num_parts > 1:
        say(console, _part_line(whole, extract.part, extract.num_parts, len(own), len(rowset.rows)))

    pending = _open_existing(store, manifest, rowset, extract.shard_tokens, console)
    if not pending:
        say(console, "\n".join(rowset.accounting.lines()))
        return report
    say(console, describe_sample(rowset, load_tokenizer(model, path)))
    say(console, describe_disk(store, pending, manifest))
    check_free_space(store, disk_bytes(pending, manifest))

    request = EngineRequest(
        path,
        facts,
        model,
        DTYPES[hardware.precision],
        pick_device(hardware),
        max_len=max(len(row.input_ids) for row in rowset.rows),
        batch_tokens=extract.batch_tokens,
        parallel=hardware.engine,
        layer_ids=layer_ids,
        scratch_dir=Path(extract.scratch_dir) if extract.scratch_dir else None,
    )
    _run_engine(request, extract, rowset, manifest, report, console)
    append_log(report)
    if report.lost:
        raise lost_rows_error(report)
    return report


def _make_rows(
    model: ModelConfig,
    data: DataConfig,
    extract: ExtractorConfig,
    hardware: HardwareConfig,
    facts: VerifierFacts,
    whole: Path,
    console: Console,
    seconds: dict[str, float],
) -> tuple[RowSet, Regenerated | None]:
    """The rows of the data, or those of the verifier's own answers, which lie in the store `whole`."""
    if not data.regenerate:
        with timed(seconds, "rows"):
            return build_rows(data, model, facts, num_workers=extract.num_render_workers), None
    regenerated = regenerate_rows(
        model=model,
        data=data,
        extract=extract,
        hardware=hardware,
        facts=facts,
        store=whole,
        console=console,
        seconds=seconds,
    )
    say(console, regenerated.generated.describe(len(regenerated.rowset.rows)))
    return regenerated.rowset, regenerated


def _run_engine(
    request: EngineRequest,
    extract: ExtractorConfig,
    rowset: RowSet,
    manifest: Manifest,
    report: ExtractReport,
    console: Console,
) -> None:
    """Load the engine, prove that its states are the verifier's, and capture what the store lacks."""
    lengths = [len(row.input_ids) for row in rowset.rows]
    samples = [rowset.rows[i].input_ids[:MAX_TOKENS] for i in sample_indices(lengths, extract.self_test_rows)]
    references = _references(extract.backend, request, samples, report.seconds)
    with timed(report.seconds, "load"):
        engine = build_engine(extract.backend, request)
    try:
        with timed(report.seconds, "self_test"):
            report.self_test = self_test_capture(
                engine, references, samples, request, manifest.dtype, console
            )
            del references
        manifest = replace(manifest, engine={"name": engine.name, **engine.versions()})
        with StoreWriter(
            report.store, manifest, rowset.rows, extract.shard_tokens, rowset.user_turns
        ) as writer:
            _capture(engine, writer, request.layer_ids, extract.batch_tokens, report, console)
            if not report.lost:
                writer.finish()
    except EngineError as error:
        raise UserError(
            Problem(
                f"the engine failed: {error}",
                expected="an answer for every row",
                fix="the same command again: what is in the store is not captured again",
            )
        ) from error
    finally:
        engine.close()


def verifier_identity(facts: VerifierFacts, name: str) -> VerifierIdentity:
    """What a store remembers of the verifier in `facts.path`, its weights included."""
    return VerifierIdentity(
        architecture=facts.architecture,
        config_hash=facts.config_hash,
        weight_fingerprint=weight_fingerprint(facts.path),
        hidden_size=facts.hidden_size,
        num_layers=facts.num_layers,
        vocab_size=facts.vocab_size,
        name=name,
    )


def plan_manifest(
    model: ModelConfig,
    facts: VerifierFacts,
    rowset: RowSet,
    layer_ids: Sequence[int],
    dtype: str,
    last_state: LastState = LastState.all,
) -> Manifest:
    """What the store will say about itself; the engine is added once it runs."""
    return Manifest(
        verifier=verifier_identity(facts, model.name),
        tokenizer_hash=rowset.tokenizer_hash,
        template_hash=rowset.template_hash,
        template_args_hash=rowset.template_args_hash,
        layer_ids=tuple(layer_ids),
        last_state_rows=last_state.value,
        dtype=dtype,
        engine={},
        accounting=rowset.accounting.as_dict(),
        row_settings={"template_args": dict(model.template_args), "max_len": rowset.max_len},
    )


def _open_existing(
    store: Path, manifest: Manifest, rowset: RowSet, shard_tokens: int, console: Console
) -> list[Row]:
    """Rows that are still to be captured; refuses a store of another plan before a model is loaded."""
    if not is_store(store):
        return rows_of_part(rowset.rows, shard_tokens, manifest.part, manifest.num_parts)
    as_stored = replace(manifest, engine=read_manifest(store).engine)  # compared once the engine runs
    with StoreWriter(store, as_stored, rowset.rows, shard_tokens, rowset.user_turns) as writer:
        pending = [row for _, shard in writer.pending() for row in shard]
        if not pending:
            writer.finish()
        for note in writer.notes:
            say(console, note)
        if pending and writer.num_tokens_done:
            left = sum(len(row.input_ids) for row in pending)
            say(console, f"going on: {writer.num_tokens_done:,} tokens are in the store, {left:,} are left")
    return pending


def _part_line(whole: Path, part: int, num_parts: int, num_rows: int, num_all: int) -> str:
    return (
        f"part {part} of {num_parts}: {num_rows:,} of {num_all:,} rows. When all parts are there, join them: "
        f"python -m eagle3lab store merge {shlex.quote(str(whole))}"
    )


def _references(
    backend: Backend, request: EngineRequest, samples: Sequence[Sequence[int]], seconds: dict[str, float]
) -> list[Reference] | None:
    """A plain transformers forward of the samples; None: the engine is another and nothing else has room."""
    backend = pick_backend(backend, request.device)
    if backend is not Backend.hf and not reference_fits(request.path, request.dtype, request.device):
        return None
    with timed(seconds, "self_test"):
        return reference_forward(
            request.path,
            request.facts,
            samples,
            dtype=request.dtype,
            device=request.device,
            trust_remote_code=request.model.trust_remote_code,
        )


def _capture(
    engine: Engine,
    writer: StoreWriter[Row],
    layer_ids: Sequence[int],
    batch_tokens: int,
    report: ExtractReport,
    console: Console,
) -> None:
    total = sum(len(row.input_ids) for _, shard in writer.pending() for row in shard)
    with CaptureProgress(console, total) as progress:
        capture_shards(
            engine,
            writer,
            layer_ids,
            batch_tokens=batch_tokens,
            store_dtype=STATE_DTYPES[writer.manifest.dtype],
            report=report,
            progress=progress,
        )
