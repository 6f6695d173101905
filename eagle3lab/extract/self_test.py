"""The alignment self-test: proof, before work is spent, that states fit layers, tokens and verifier."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.engines.base import Engine, SecondOpinion, States, check_states
from eagle3lab.engines.request import EngineRequest
from eagle3lab.extract.alignment import SelfTestReport, Tolerance, measure, tolerance_for
from eagle3lab.extract.diagnose import diagnose
from eagle3lab.extract.next_tokens import measure_next_tokens, require_next_tokens
from eagle3lab.extract.progress import say
from eagle3lab.extract.reference import Reference, reference_forward
from eagle3lab.extract.second_opinion import compare_captures, engine_references, forward_fits
from eagle3lab.store.fp8 import FP8, dequantize, quantize
from eagle3lab.store.last_states import kept_positions
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights, load_edge_weights

MAX_TOKENS = 512  # of one sampled row; a causal state does not depend on what follows
ANSWER_TOKENS = 64  # of one row at least, also behind a prompt of about that length or more
STORE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float8_e4m3": FP8}


def sample_indices(lengths: Sequence[int], num_rows: int) -> list[int]:
    """`num_rows` rows spread evenly over the lengths, the shortest (of two tokens or more) to the longest."""
    order = sorted((i for i, n in enumerate(lengths) if n > 1), key=lambda i: (lengths[i], i))
    order = order or list(range(len(lengths)))
    last = len(order) - 1
    picks = [order[round(j * last / max(1, num_rows - 1))] for j in range(min(num_rows, len(order)))]
    return list(dict.fromkeys(picks))


def self_test_engine(
    engine: Engine,
    references: Sequence[Reference],
    layer_ids: Sequence[int],
    facts: VerifierFacts,
    edge: EdgeWeights,
    *,
    compute_dtype: torch.dtype,
    store_dtype: torch.dtype,
) -> SelfTestReport:
    """Capture the references' rows as one batch and hold the states, as they would be stored, against them.

    Raises:
        IntegrityError: with the measured errors and the suspect.
    """
    rows = [list(reference.token_ids) for reference in references]
    samples = []
    for states, row in zip(engine.capture(rows, layer_ids), rows, strict=True):
        check_states(states, row, len(layer_ids), facts.hidden_size)
        aux = as_stored(states.aux, store_dtype, facts.hidden_size)
        samples.append(States(states.token_ids, aux, as_stored(states.last, store_dtype, facts.hidden_size)))
    return check_alignment(
        samples,
        references,
        layer_ids,
        facts,
        edge,
        tolerance_for(compute_dtype, store_dtype),
        where=f"engine {engine.name!r}",
        fix="extract.backend=hf, or another version of the engine; nothing was written",
    )


def self_test_capture(
    engine: Engine,
    references: Sequence[Reference] | None,
    samples: Sequence[Sequence[int]],
    request: EngineRequest,
    stored_dtype: str,
    console: Console,
) -> SelfTestReport:
    """The engine's states against a plain transformers forward and against its own second capture.

    Without references (the verifier does not fit a second time) the second capture stands in for them.
    """
    facts, layer_ids, dtype = request.facts, request.layer_ids, request.dtype
    by_itself = references is None
    edge = load_edge_weights(facts, parts=("embedding", "head", "norm") if by_itself else ("head", "norm"))
    if references is None:
        if not isinstance(engine, SecondOpinion):
            raise ValueError(f"engine {engine.name!r} has no second capture and there is no reference")
        references = engine_references(engine, samples, facts, edge)
        say(console, "the verifier does not fit beside the engine: the self-test uses hooks in the engine")
    report = self_test_engine(
        engine,
        references,
        layer_ids,
        facts,
        edge,
        compute_dtype=dtype,
        store_dtype=STORE_DTYPES[stored_dtype],
    )
    say(console, f"alignment self-test passed: {report}")
    if not by_itself:
        errors = compare_captures(engine, samples, layer_ids, facts, tolerance_for(dtype, dtype))
        if errors:
            figures = ", ".join(f"{name}: {error:.1e}" for name, error in errors.items())
            say(console, f"second capture by hooks agrees, largest relative error {{{figures}}}")
    return report


def as_stored(states: Tensor, store_dtype: torch.dtype, hidden_size: int) -> Tensor:
    """States [T, n * hidden_size] as a store of that dtype gives them back."""
    if store_dtype == FP8:
        return dequantize(*quantize(states.to(torch.bfloat16), hidden_size), hidden_size)
    return states.to(store_dtype)


def self_test_line(
    reader: StoreReader, facts: VerifierFacts, *, num_rows: int, device: str, trust_remote_code: bool
) -> str:
    """`self_test_store` at the start of a training, in a line; without rows it says what goes unnoticed.

    A verifier without room on the device is not loaded: the last states are held against the tokens alone.
    """
    if not num_rows:
        return (
            "alignment self-test: SWITCHED OFF (train.self_test=false); a store taken one layer off would not be "
            "noticed"
        )
    if not forward_fits(facts.path, torch.float32, device):
        return f"alignment self-test without a forward pass, for which there is no room, passed: {_by_tokens(reader, facts, num_rows)}"
    report = self_test_store(
        reader,
        facts.path,
        facts,
        num_rows=num_rows,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    return f"alignment self-test passed: {report}"


def _by_tokens(reader: StoreReader, facts: VerifierFacts, num_rows: int) -> str:
    """The figures of `next_tokens`, and what they leave open. Raises IntegrityError as `self_test_store`."""
    samples, kept = _sample(reader, num_rows)
    edge = load_edge_weights(facts, parts=("head", "norm"))
    eps, vocab_size = facts.rms_norm_eps, facts.vocab_size
    found = measure_next_tokens(samples, kept, edge, eps=eps, vocab_size=vocab_size)
    require_next_tokens(found, where=f"store {reader.path}", fix=_fix(reader))
    return f"{found}. Aux layers were tested when they were extracted (logs/extract.json of the store)"


def _fix(reader: StoreReader) -> str:
    return (
        f"model.path=DIRECTORY of the checkpoint that wrote it ({reader.manifest.verifier.name}), or write "
        "another store: python extract.py store=NEW_DIRECTORY"
    )


def self_test_store(
    reader: StoreReader,
    path: Path,
    facts: VerifierFacts,
    *,
    num_rows: int = 2,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> SelfTestReport:
    """Hold sampled rows of a store against a fresh fp32 forward of the verifier in `path`.

    Last states are tested where the store keeps them. The bounds follow the coarser of its engine and its storage.
    Raises:
        IntegrityError: with the measured errors and the suspect.
        UserError: the store keeps no last state at all.
    """
    manifest = reader.manifest
    samples, last_kept = _sample(reader, num_rows)
    references = reference_forward(
        path,
        facts,
        [states.token_ids.tolist() for states in samples],
        dtype=torch.float32,
        device=device,
        trust_remote_code=trust_remote_code,
    )
    engine_dtype = STORE_DTYPES.get(manifest.engine.get("dtype", "float32"), torch.bfloat16)
    compute = torch.float32 if engine_dtype == torch.float32 else torch.bfloat16
    return check_alignment(
        samples,
        references,
        manifest.layer_ids,
        facts,
        load_edge_weights(facts, parts=("head", "norm")),
        tolerance_for(compute, STORE_DTYPES[manifest.dtype]),
        where=f"store {reader.path}",
        fix=_fix(reader),
        last_kept=last_kept,
    )


def _sample(reader: StoreReader, num_rows: int) -> tuple[list[States], list[Tensor]]:
    """The first MAX_TOKENS of sampled rows, and where they have a last state, bool [T]: somewhere at least."""
    whole = reader.manifest.all_last_states
    usable = [i for i, row in enumerate(reader.rows) if row.num_last_states]
    if not usable:
        what = f"the store {reader.path} keeps no last state, since none of its rows has a supervised token"
        raise UserError(Problem(what, fix="other data, or extract.last_state=all"))
    if not whole:  # a share of a handful of tokens says little: the rows with the longer answers
        richest = sorted(usable, key=lambda i: -reader.rows[i].num_last_states)
        usable = sorted(richest[: max(num_rows, -(-len(usable) // 2))])
    picks = [usable[j] for j in sample_indices([reader.rows[i].length for i in usable], num_rows)]
    if whole:
        kept = [torch.ones(reader.rows[i].length, dtype=torch.bool) for i in picks]
    else:
        kept = [kept_positions(reader.read_mask(i)) for i in picks]
    ends = [MAX_TOKENS] * len(picks)
    firsts = [int(marked.nonzero()[0]) for marked in kept]
    earliest = firsts.index(min(firsts))
    ends[earliest] = max(MAX_TOKENS, firsts[earliest] + ANSWER_TOKENS)
    samples = []
    for i, end in zip(picks, ends, strict=True):
        row = reader.read(i)
        ids, states = row["input_ids"][:end].long(), row["aux_hidden_states"][:end]
        samples.append(States(ids, states, row["verifier_last_hidden_states"][:end]))
    return samples, [marked[:end] for marked, end in zip(kept, ends, strict=True)]


def check_alignment(
    samples: Sequence[States],
    references: Sequence[Reference],
    layer_ids: Sequence[int],
    facts: VerifierFacts,
    edge: EdgeWeights,
    tolerance: Tolerance,
    *,
    where: str,
    fix: str,
    last_kept: Sequence[Tensor] | None = None,
) -> SelfTestReport:
    """Measure, and on a figure out of bounds raise `IntegrityError` that names the suspect.

    last_kept: bool [T] of every sample, where its last state is one; default: everywhere.
    """
    report = measure(samples, references, layer_ids, facts, edge, tolerance, last_kept)
    if report.passed:
        return report
    suspect = diagnose(samples, references, layer_ids, report, last_kept)
    raise IntegrityError(
        Problem(
            f"alignment self-test failed for {where}: {suspect}",
            str(report),
            f"argmax agreement >= {tolerance.argmax_agreement}, KL <= {tolerance.kl}, logits <= "
            f"{tolerance.logit_error}, states <= {tolerance.state_error}",
            fix,
        )
    )
