"""Sample files of speculators 0.3 to 0.9 -> a store. Nothing in them is executed, and nothing is believed.

The files name neither their verifier nor their layers: both are given, and the alignment self-test holds
them against the files' own states before anything is written.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from eagle3lab.config.errors import IntegrityError, Problem, UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.data.legacy import standardize_data_v1
from eagle3lab.data.sample_files import SampleFiles
from eagle3lab.engines.base import States
from eagle3lab.extract.alignment import SelfTestReport, tolerance_for
from eagle3lab.extract.disk_need import disk_bytes
from eagle3lab.extract.pipeline import verifier_identity
from eagle3lab.extract.reference import reference_forward
from eagle3lab.extract.self_test import MAX_TOKENS, STORE_DTYPES, as_stored, check_alignment, sample_indices
from eagle3lab.rows.rows import Accounting, Row
from eagle3lab.store.disk import check_free_space
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest
from eagle3lab.store.shards import DTYPES
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eagle3lab.verifier.weights import load_edge_weights

UNKNOWN = "unknown: imported"  # the files do not say with which tokenizer and template they were made
_LAYER_IDS = "--layer-ids"  # the option of `store import`
_LOSSLESS = {torch.bfloat16: "bfloat16", torch.float16: "float32", torch.float32: "float32"}


def import_samples(
    source: Path,
    store: Path,
    model: ModelConfig,
    verifier: Path,
    *,
    layer_ids: Sequence[int] | None = None,
    dtype: str | None = None,
    validation_share: float = 0.05,
    shard_tokens: int = 16384,
    self_test_rows: int = 2,
    device: str = "cpu",
    say: Callable[[str], None] = print,
) -> Manifest:
    """Write every sample file under `source` to `store`, or go on where an earlier import stopped.

    verifier: the directory of the checkpoint that the states come from; `model` names it. layer_ids: the
    aux layers in the files' order (default: those of three slots). dtype: of the store (default: lossless).
    A row's split follows from a hash of its tokens, so copies of a row share a side.

    Raises UserError for a directory that is none, or a wrong number of layers; IntegrityError with the file's
    name for damaged files and, with the suspect, for states that are not the verifier's.
    """
    facts = read_facts(verifier)
    files = SampleFiles(source, standardize_data_v1)
    ids = _layer_ids(layer_ids, files.num_aux_states, facts)
    if files.hidden_size != facts.hidden_size:
        what = f"{source}: hidden size of the states"
        raise UserError(Problem(what, files.hidden_size, f"{facts.hidden_size} of the verifier {verifier}"))
    rows, positions, accounting = _plan(files, facts, validation_share)
    for line in accounting.lines():
        say(line)
    native = files.read(next(iter(positions.values())))["hidden_states"].dtype
    if dtype is None and native not in _LOSSLESS:
        what = f"{source}: no store holds these states without a loss"
        raise UserError(Problem(what, str(native), "a dtype that you choose", "--dtype float32"))
    store_dtype = dtype or _LOSSLESS[native]
    report = _self_test(files, positions, ids, facts, verifier, model, store_dtype, self_test_rows, device)
    say(f"alignment self-test passed: {report}")
    manifest = Manifest(
        verifier=verifier_identity(facts, model.name),
        tokenizer_hash=UNKNOWN,
        template_hash=UNKNOWN,
        template_args_hash=UNKNOWN,
        layer_ids=ids,
        dtype=store_dtype,
        # "dtype" is the precision of the capture, which the files do not tell: the coarser one is assumed
        engine={"name": "import", "files": files.files[0].suffix, "dtype": "bfloat16"},
        accounting=accounting.as_dict(),
    )
    check_free_space(store, disk_bytes(rows, manifest))
    with StoreWriter(store, manifest, rows, shard_tokens) as writer:
        for note in writer.notes:
            say(note)
        for number, shard in writer.pending():
            states = []
            for row in shard:
                data = files.read(positions[row.source])
                aux, last = data["hidden_states"], data["verifier_last_hidden_states"]
                if {aux.dtype, last.dtype} != {native}:
                    found = f"{aux.dtype}, of the last state {last.dtype}"
                    what = f"{row.source}: dtype of the aux states"
                    raise IntegrityError(Problem(what, found, f"{native} as in the other files"))
                cast = DTYPES[store_dtype]
                states.append((row, aux.to(cast), last.to(cast), data["input_ids"].long()))
            writer.write_shard(number, states)
        return writer.finish()


def _layer_ids(layer_ids: Sequence[int] | None, num_aux: int, facts: VerifierFacts) -> tuple[int, ...]:
    ids = layer_ids or default_aux_layer_ids(facts.num_layers, override=_LAYER_IDS)
    if len(ids) != num_aux:
        raise UserError(
            Problem(
                f"the files hold {num_aux} aux layers; layer ids",
                list(ids),
                expected=f"{num_aux} ids, in the files' order",
                fix=f"{_LAYER_IDS} ID ID ...",
            )
        )
    return check_aux_layer_ids(ids, facts.num_layers, override=_LAYER_IDS)


def _plan(
    files: SampleFiles, facts: VerifierFacts, validation_share: float
) -> tuple[list[Row], dict[str, int], Accounting]:
    """The rows, their file positions by source, and the account; only ids and masks are read."""
    rows: list[Row] = []
    positions: dict[str, int] = {}
    accounting = Accounting(read=len(files.files))
    seen: set[str] = set()
    for i, file in enumerate(files.files):
        ids, mask = files.read_tokens(i)
        source = f"{file.parent.name}/{file.name}"
        if len(ids) < 2:
            accounting.drop("too_short", source)
            continue
        if source in positions:
            raise UserError(Problem("two files have the same name and directory name", source))
        outside = ids[(ids < 0) | (ids >= facts.vocab_size)]
        if len(outside) or not bool(((mask == 0) | (mask == 1)).all()):
            expected = f"token ids from 0 to {facts.vocab_size - 1} and a mask of 0 and 1"
            raise IntegrityError(Problem(f"{file}: ids or mask", outside[:3].tolist() or None, expected))
        row_id = row_id_of(ids, mask)
        noted = {"duplicate": 1} if row_id in seen else {}
        noted |= {"unsupervised": 1} if not bool(mask[1:].any()) else {}
        accounting.add({}, {}, noted)
        seen.add(row_id)
        digest = hashlib.sha256(f"import\n{row_id}".encode()).digest()
        validation = int.from_bytes(digest[:8], "big") < validation_share * 2**64
        split = "validation" if validation else "train"
        rows.append(Row(row_id, row_id, source, split, tuple(ids.tolist()), tuple(mask.tolist())))
        positions[source] = i
    accounting.kept = accounting.rows = len(rows)
    if not rows:
        raise UserError(Problem("no file became a row", "\n".join(accounting.lines())))
    return rows, positions, accounting


def _self_test(
    files: SampleFiles,
    positions: dict[str, int],
    layer_ids: Sequence[int],
    facts: VerifierFacts,
    verifier: Path,
    model: ModelConfig,
    store_dtype: str,
    num_rows: int,
    device: str,
) -> SelfTestReport:
    usable = list(positions.values())
    storage = STORE_DTYPES[store_dtype]
    samples = []
    for pick in sample_indices([files.lengths[i] for i in usable], num_rows):
        data = files.read(usable[pick])
        states = [data[name][:MAX_TOKENS] for name in ("hidden_states", "verifier_last_hidden_states")]
        aux, last = (as_stored(part, storage, facts.hidden_size) for part in states)
        samples.append(States(data["input_ids"][:MAX_TOKENS].long(), aux, last))
    references = reference_forward(
        verifier,
        facts,
        [sample.token_ids.tolist() for sample in samples],
        dtype=torch.float32,
        device=device,
        trust_remote_code=model.trust_remote_code,
    )
    return check_alignment(
        samples,
        references,
        layer_ids,
        facts,
        load_edge_weights(facts, parts=("head", "norm")),
        tolerance_for(torch.bfloat16, storage),
        where=f"the files in {files.files[0].parent}",
        fix="--layer-ids with the layers that the files really hold, or --model-path of their checkpoint; "
        "nothing was written",
    )
