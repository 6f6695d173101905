"""Conversations -> rows -> engine -> checks -> store."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import DataConfig, ExtractorConfig, HardwareConfig, ModelConfig
from eagle3lab.engines.base import Engine
from eagle3lab.engines.select import DTYPES, build_engine, pick_device
from eagle3lab.extract.batches import plan_batches
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.extract.reference import reference_forward
from eagle3lab.extract.report import ExtractReport, append_log
from eagle3lab.extract.self_test import MAX_TOKENS, STORE_DTYPES, sample_indices, self_test_engine
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import Row, RowSet
from eagle3lab.rows.sample import describe_sample
from eagle3lab.rows.tokenizer import load_tokenizer
from eagle3lab.store.disk import check_free_space, estimate_bytes
from eagle3lab.store.manifest import Manifest, VerifierIdentity, is_store, read_manifest
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import VerifierFacts, read_facts, weight_fingerprint
from eagle3lab.verifier.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eagle3lab.verifier.locate import locate_verifier
from eagle3lab.verifier.weights import load_edge_weights

BYTES_PER_TOKEN_BESIDE_STATES = 9  # its id and its mask


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
    with _timed(seconds, "fetch"):
        path = locate_verifier(model)
    facts = read_facts(path)
    layer_ids = resolve_layer_ids(model, extract, facts)
    if model.trust_remote_code:
        _say(console, f"model.trust_remote_code=true: code that lies in {path} will be run")
    with _timed(seconds, "rows"):
        rowset = build_rows(data, model, facts, num_workers=extract.num_render_workers)
        if not rowset.rows:
            raise UserError(Problem("no conversation became a row", "\n".join(rowset.accounting.lines())))
    manifest = plan_manifest(model, facts, rowset, layer_ids, extract.dtype.value)
    num_bytes = estimate_bytes(rowset.num_tokens, facts.hidden_size, len(layer_ids), manifest.dtype)
    report = ExtractReport(store, len(rowset.rows), rowset.num_tokens, num_bytes, seconds=seconds)

    pending_tokens = _open_existing(store, manifest, rowset.rows, extract.shard_tokens, console)
    if pending_tokens == 0:
        _say(console, rowset.accounting.lines()[0])
        return report
    _say(console, describe_sample(rowset, load_tokenizer(model, path)))
    _refuse_full_disk(store, pending_tokens, manifest, console)

    dtype, device = DTYPES[hardware.precision], pick_device(hardware)
    store_dtype = STORE_DTYPES[manifest.dtype]
    with _timed(seconds, "self_test"):
        picks = sample_indices([len(row.input_ids) for row in rowset.rows], extract.self_test_rows)
        references = reference_forward(
            path,
            facts,
            [rowset.rows[i].input_ids[:MAX_TOKENS] for i in picks],
            dtype=dtype,
            device=device,
            trust_remote_code=model.trust_remote_code,
        )
    with _timed(seconds, "load"):
        engine = build_engine(extract.backend, path, facts, model, dtype=dtype, device=device)
    try:
        with _timed(seconds, "self_test"):
            edge = load_edge_weights(facts, parts=("head", "norm"))
            report.self_test = self_test_engine(
                engine, references, layer_ids, facts, edge, compute_dtype=dtype, store_dtype=store_dtype
            )
            del references, edge
        _say(console, f"alignment self-test passed: {report.self_test}")
        manifest = replace(manifest, engine={"name": engine.name, **engine.versions()})
        with StoreWriter(store, manifest, rowset.rows, extract.shard_tokens) as writer:
            _capture(engine, writer, layer_ids, extract.batch_tokens, report, console)
            writer.finish()
    finally:
        engine.close()
    append_log(report)
    return report


def resolve_layer_ids(model: ModelConfig, extract: ExtractorConfig, facts: VerifierFacts) -> tuple[int, ...]:
    """`extract.layer_ids`, else the model's, else the default rule; checked against the verifier."""
    ids = extract.layer_ids or model.aux_layer_ids
    return check_aux_layer_ids(ids, facts.num_layers) if ids else default_aux_layer_ids(facts.num_layers)


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
    model: ModelConfig, facts: VerifierFacts, rowset: RowSet, layer_ids: Sequence[int], dtype: str
) -> Manifest:
    """What the store will say about itself; the engine is added once it runs."""
    return Manifest(
        verifier=verifier_identity(facts, model.name),
        tokenizer_hash=rowset.tokenizer_hash,
        template_hash=rowset.template_hash,
        template_args_hash=rowset.template_args_hash,
        layer_ids=tuple(layer_ids),
        dtype=dtype,
        engine={},
        accounting=rowset.accounting.as_dict(),
    )


def _open_existing(
    store: Path, manifest: Manifest, rows: Sequence[Row], shard_tokens: int, console: Console
) -> int:
    """Tokens that are still to be captured; refuses a store of another plan before a model is loaded."""
    if not is_store(store):
        return sum(len(row.input_ids) for row in rows)
    as_stored = replace(manifest, engine=read_manifest(store).engine)  # compared once the engine runs
    with StoreWriter(store, as_stored, rows, shard_tokens) as writer:
        pending = sum(len(row.input_ids) for _, shard in writer.pending() for row in shard)
        if pending == 0:
            writer.finish()
        for note in writer.notes:
            _say(console, note)
        if pending and writer.num_tokens_done:
            _say(
                console, f"going on: {writer.num_tokens_done:,} tokens are in the store, {pending:,} are left"
            )
    return pending


def _refuse_full_disk(store: Path, num_tokens: int, manifest: Manifest, console: Console) -> None:
    hidden_size, num_ids = manifest.verifier.hidden_size, len(manifest.layer_ids)
    needed = estimate_bytes(num_tokens, hidden_size, num_ids, manifest.dtype)
    needed += BYTES_PER_TOKEN_BESIDE_STATES * num_tokens
    _say(
        console,
        f"disk: {num_tokens:,} tokens x {num_ids + 1} states x {hidden_size} x {manifest.dtype} = "
        f"{needed / 2**20:,.1f} MiB in {store}",
    )
    check_free_space(store, needed)


def _capture(
    engine: Engine,
    writer: StoreWriter[Row],
    layer_ids: Sequence[int],
    batch_tokens: int,
    report: ExtractReport,
    console: Console,
) -> None:
    store_dtype = STORE_DTYPES[writer.manifest.dtype]
    pending = list(writer.pending())
    total = sum(len(row.input_ids) for _, shard in pending for row in shard)
    with CaptureProgress(console, total) as progress:
        for number, shard in pending:
            captured: dict[int, tuple[Row, Tensor, Tensor, Tensor]] = {}
            for batch in plan_batches([len(row.input_ids) for row in shard], batch_tokens):
                with _timed(report.seconds, "capture"):
                    rows = [shard[i] for i in batch]
                    for i, states in zip(
                        batch, engine.capture([r.input_ids for r in rows], layer_ids), strict=True
                    ):
                        aux, last = states.aux.to(store_dtype), states.last.to(store_dtype)
                        captured[i] = (shard[i], aux, last, states.token_ids)
                progress.advance(sum(len(row.input_ids) for row in rows))
            with _timed(report.seconds, "write"):
                writer.write_shard(number, [captured[i] for i in range(len(shard))])
            report.num_captured_rows += len(shard)
            report.num_captured_tokens += sum(len(row.input_ids) for row in shard)


@contextmanager
def _timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = seconds.get(name, 0.0) + time.perf_counter() - start


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
