"""Layer 5: a hidden-state store: its manifest, its index, every shard's header, bytes and rows of a sample."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.config.schema import ModelConfig

from .check import Check, Finding, examine, fail, warn

LAYER = "store"
NUM_ROWS = 8
BYTE_BUDGET = 2**30  # of shards whose checksum is recomputed; a smaller store is checked whole


def check_store(
    path: Path, model: ModelConfig, verifier: Path | None, *, extract_command: str
) -> Iterator[Check]:
    """Whether the store at `path` is whole, what it says it is, and of this verifier and tokenizer."""
    from eagle3lab.store.manifest import is_store

    again = f"delete {path} and run: {extract_command}"
    if not is_store(path):
        found = f"there is no store at {path}"
        yield examine(LAYER, "manifest", partial(warn, found, extract_command), again)
        return
    yield examine(LAYER, "manifest", partial(_manifest, path, extract_command), again)
    whole = examine(LAYER, "index and headers", partial(_headers, path, extract_command), again)
    yield whole
    if whole.remedy:  # nothing that is read through a broken index means anything
        return
    yield examine(LAYER, "checksums", partial(_checksums, path), again)
    yield examine(LAYER, "rows", partial(_rows, path), again)
    if verifier is not None:
        other = "model=THE_ONE_THAT_WAS_EXTRACTED, or store=DIRECTORY of this verifier"
        yield examine(LAYER, "identity", partial(_identity, path, model, verifier), other)


def _manifest(path: Path, extract_command: str) -> str | Finding:
    from eagle3lab.store.manifest import read_manifest

    manifest = read_manifest(path)
    share = manifest.num_supervised / max(1, manifest.num_tokens)
    found = (
        f"{path}: {manifest.num_rows:,} rows, {manifest.num_tokens:,} tokens, {share:.0%} supervised, "
        f"layers {list(manifest.layer_ids)}{'' if manifest.all_last_states else ', last states where supervised'}, "
        f"{manifest.dtype}, of {manifest.verifier.name}"
    )
    return (
        found if manifest.complete else warn(f"{found}: not finished", f"{extract_command}    (it goes on)")
    )


def _headers(path: Path, extract_command: str) -> str:
    from eagle3lab.store.reader import StoreReader

    reader = StoreReader(path, extract_command=extract_command)
    shards = len({row.shard for row in reader.rows})
    return f"{shards} shard(s) and {len(reader)} rows agree with the manifest"


def _checksums(path: Path) -> str | Finding:
    from eagle3lab.store.files import sha256_of
    from eagle3lab.store.index import read_index

    entries, _ = read_index(path)
    sizes = [(path / entry.file).stat().st_size for entry in entries]
    chosen = spread(len(entries), _affordable(sizes))
    damaged = [entries[i].file for i in chosen if sha256_of(path / entries[i].file) != entries[i].sha256]
    if damaged:
        files = " ".join(str(path / file) for file in damaged)
        found = f"{len(damaged)} shard(s) hold other bytes than were written: {', '.join(damaged)}"
        return fail(found, f"rm {files}; the extract.py that made the store then captures only these again")
    part = "all" if len(chosen) == len(entries) else "a spread sample"
    gigabytes = sum(sizes[i] for i in chosen) / 1e9
    return f"{len(chosen)} of {len(entries)} shard(s) ({part}), {gigabytes:.2f} GB"


def _affordable(sizes: Sequence[int]) -> int:
    """How many shards fit the byte budget, at least one."""
    largest = max(sizes, default=1)
    return len(sizes) if sum(sizes) <= BYTE_BUDGET else max(1, BYTE_BUDGET // largest)


def spread(total: int, wanted: int) -> list[int]:
    """`wanted` positions of `total`, evenly spread, first and last included from two on."""
    if wanted >= total:
        return list(range(total))
    if wanted == 1:
        return [0]
    return sorted({round(i * (total - 1) / (wanted - 1)) for i in range(wanted)})


def _rows(path: Path) -> str:
    from eagle3lab.store.reader import StoreReader

    reader = StoreReader(path)
    chosen = spread(len(reader), NUM_ROWS)
    tokens = sum(len(reader.read(i)["input_ids"]) for i in chosen)
    counted = int(reader.token_counts().sum())
    return f"{len(chosen)} rows read, {tokens} tokens: ids hash, states finite; {counted:,} tokens counted"


def _identity(path: Path, model: ModelConfig, verifier: Path) -> str | Finding:
    from eagle3lab.rows.tokenizer import load_tokenizer, template_args_hash, template_hash, tokenizer_hash
    from eagle3lab.store.manifest import check_identity, read_manifest
    from eagle3lab.verifier.facts import read_facts, weight_fingerprint

    manifest, facts = read_manifest(path), read_facts(verifier)
    check_identity(manifest, facts, model.aux_layer_ids or ())
    fingerprint = weight_fingerprint(verifier)
    if manifest.verifier.weight_fingerprint != fingerprint:
        raise IntegrityError(
            Problem("the store is of other weights", manifest.verifier.weight_fingerprint, fingerprint)
        )
    tokenizer = load_tokenizer(model, verifier)
    now = {
        "tokenizer": (manifest.tokenizer_hash, tokenizer_hash(model, verifier)),
        "chat template": (manifest.template_hash, template_hash(tokenizer)),
        "template arguments": (manifest.template_args_hash, template_args_hash(tokenizer, model)),
    }
    changed = [name for name, (stored, current) in now.items() if stored != current]
    if changed:
        remedy = "serve with what the store was written with, or extract again into store=DIRECTORY"
        return warn(f"written with another {', '.join(changed)} than model={model.name} has now", remedy)
    return "of this verifier, tokenizer and template"
