"""States captured by vLLM and read back from a store, against Hugging Face forwards of the same verifier.

python benchmarks/vllm_exactness.py --out benchmarks/results/vllm_exactness_h200.json
python benchmarks/vllm_exactness.py --device cpu --model tiny

Exits with 1 when a figure is out of bounds. Relative errors are |a - b| / |b| per token.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from common import ROOT, write_results
from exactness_figures import Layers, as_table, by_layer, compare, out_of_bounds
from rich.console import Console

from eagle3lab.config.errors import IntegrityError
from eagle3lab.config.schema import Backend, DataConfig, EngineConfig, ModelConfig, VerifierSource
from eagle3lab.engines.base import Engine, EngineError
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.select import build_engine
from eagle3lab.engines.vllm_engine import VllmEngine
from eagle3lab.extract.alignment import relative_errors
from eagle3lab.extract.capture import capture_shards
from eagle3lab.extract.pipeline import plan_manifest
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.extract.report import ExtractReport
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import Row, RowSet
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.locate import locate_verifier
from eagle3lab.verifier.weights import load_edge_weights, verifier_logits

MODELS = {  # aux layer ids, conversations, tokens of the longest row
    "smollm2_135m": ((2, 15, 27), "asset:demo/conversations.jsonl.xz", 512),
    "tiny": ((1, 2, 3), "asset:tiny_chat/conversations.jsonl.xz", 120),
}
DTYPES = {"bf16": (torch.bfloat16, "bfloat16"), "fp32": (torch.float32, "float32")}
BOUNDS = {"bf16": (0.03, 0.97), "fp32": (1e-4, 0.999)}  # mean relative error of a layer, argmax agreement
SHARED_PREFIXES = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/vllm_exactness_h200.json")
    parser.add_argument("--model", choices=sorted(MODELS), default="smollm2_135m")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: bf16 on cuda, fp32 on cpu")
    parser.add_argument("--conversations", type=int, default=120)
    parser.add_argument("--hook-rows", type=int, default=24, help="rows of which every layer is compared")
    parser.add_argument("--cuts", type=int, default=4, help="next tokens of a row beside its served prompts")
    arguments = parser.parse_args()
    name = arguments.dtype or ("bf16" if arguments.device == "cuda" else "fp32")
    dtype, stored_as = DTYPES[name]
    layer_ids, file, max_len = MODELS[arguments.model]

    model = ModelConfig(name=arguments.model, source=VerifierSource(arguments.model))
    path = locate_verifier(model)
    facts = read_facts(path)
    data = DataConfig(
        name="demo", paths=[file], max_len=max_len, max_conversations=2 * arguments.conversations
    )
    rowset = choose_rows(build_rows(data, model, facts), arguments.conversations)
    rows = rowset.rows
    lengths = [len(row.input_ids) for row in rows]
    batch_tokens = max(64, max(lengths) // 2)  # below the longest row: its prefill comes in chunks
    num_chunked = sum(length > batch_tokens for length in lengths)
    print(
        f"{len(rows)} rows, {sum(lengths):,} tokens, {num_chunked} longer than one forward of "
        f"{batch_tokens}, {SHARED_PREFIXES} with another row's prefix",
        flush=True,
    )
    everywhere = tuple(range(1, facts.num_layers))

    start = time.perf_counter()
    hooked = rows[: arguments.hook_rows]
    references: dict[str, tuple[list[Layers], list[Layers]]] = {}
    for kind, kind_dtype in (("fp32", torch.float32), ("same", dtype)):
        engine = HuggingFaceEngine(path, facts, kind_dtype, arguments.device)
        references[kind] = (
            captured(engine, rows, layer_ids, facts),
            captured(engine, hooked, everywhere, facts),
        )
        engine.close()
    print(f"Hugging Face references: {time.perf_counter() - start:.1f} s", flush=True)

    start = time.perf_counter()
    request = EngineRequest(
        path=path,
        facts=facts,
        model=model,
        dtype=dtype,
        device=arguments.device,
        max_len=max(lengths),
        batch_tokens=batch_tokens,
        parallel=EngineConfig(memory_share=0.3),
        layer_ids=layer_ids,
    )
    vllm = build_engine(Backend.vllm, request)
    assert isinstance(vllm, VllmEngine)
    failures: list[str] = []
    versions = vllm.versions()
    print(f"vLLM {versions['vllm']} is ready: {time.perf_counter() - start:.1f} s", flush=True)
    try:
        with tempfile.TemporaryDirectory() as directory:
            stored = through_a_store(
                vllm, Path(directory) / "store", rowset, model, facts, layer_ids, stored_as, batch_tokens
            )
        prompts = [cut for i, row in enumerate(rows) for cut in cuts_of(i, row, arguments.cuts)]
        chosen = [vllm.generate(rows[i].input_ids[: t + 1], 1)[0] for i, t in prompts]
        hooks = hooked_states(vllm, hooked, everywhere, failures)
    finally:
        vllm.close()

    table = [
        {"capture": "store", "layer_id": k, **compare(k, stored, *(references[r][0] for r in references))}
        for k in (*map(str, layer_ids), "last")
    ]
    if hooks:
        table += [
            {"capture": "hooks", "layer_id": k, **compare(k, hooks, *(references[r][1] for r in references))}
            for k in (*map(str, everywhere), "last")
        ]
    for row in table[: len(layer_ids) + 1] if hooks else ():
        seen = [relative_errors(a[row["layer_id"]], b[row["layer_id"]])
                for a, b in zip(stored, hooks, strict=False)]  # fmt: skip
        row["store_against_hooks"] = float(torch.cat(seen).mean())
    agreement = next_tokens(prompts, chosen, stored, references["fp32"][0], path, facts, name)
    problems = failures + out_of_bounds(table, agreement, *BOUNDS[name])
    print(as_table(table))
    print(agreement, flush=True)
    write_results(
        arguments.out,
        [*table, agreement],
        notes={
            "model": arguments.model,
            "dtype": name,
            "engine": versions,
            "rows": len(rows),
            "tokens": sum(lengths),
            "batch_tokens": batch_tokens,
            "rows_in_chunks": num_chunked,
            "rows_sharing_a_prefix": SHARED_PREFIXES,
            "bounds": dict(zip(("mean_relative_error", "argmax_agreement"), BOUNDS[name], strict=True)),
            "out_of_bounds": problems,
        },
    )
    if problems:
        sys.exit("out of bounds: " + "; ".join(problems))


def choose_rows(rowset: RowSet, num_conversations: int) -> RowSet:
    """The rows of the first conversations, and some that begin like one row and end like another."""
    wanted = list(dict.fromkeys(row.conversation_id for row in rowset.rows))[:num_conversations]
    if len(wanted) < num_conversations:
        sys.exit(f"only {len(wanted)} conversations became rows")
    rows = [row for row in rowset.rows if row.conversation_id in set(wanted)]
    for i in range(SHARED_PREFIXES):
        first, second = rows[i].input_ids, rows[i + SHARED_PREFIXES].input_ids
        start = len(first) * 3 // 4
        ids = first[:start] + second[len(second) - len(first) // 4 :]
        mask = (0,) * start + (1,) * (len(ids) - start)
        rows.append(Row(row_id_of(ids, mask), f"shared-{i}", f"shared:{i}", "train", ids, mask))
    return dataclasses.replace(rowset, rows=tuple(rows))


def captured(
    engine: Engine, rows: Sequence[Row], layer_ids: Sequence[int], facts: VerifierFacts
) -> list[Layers]:
    """States by layer, one row at a time."""
    states = (engine.capture([row.input_ids], layer_ids)[0] for row in rows)
    return [by_layer(s.aux.float(), s.last.float(), layer_ids, facts.hidden_size) for s in states]


def hooked_states(
    engine: VllmEngine, rows: Sequence[Row], layer_ids: Sequence[int], failures: list[str]
) -> list[Layers]:
    """The second opinion of every layer; without one, why, in `failures`: the other figures still count."""
    try:
        recordings = engine.record([row.input_ids for row in rows], layer_ids)
    except (EngineError, IntegrityError) as error:
        failures.append(f"hooks: {error}")
        return []
    return [
        {str(k): state.float() for k, state in recording.layers.items()}
        | {"last": recording.pre_norm.float()}
        for recording in recordings
    ]


def through_a_store(
    engine: Engine,
    store: Path,
    rowset: RowSet,
    model: ModelConfig,
    facts: VerifierFacts,
    layer_ids: Sequence[int],
    dtype: str,
    batch_tokens: int,
) -> list[Layers]:
    """Captured as extract.py does it, written, and read back."""
    manifest = plan_manifest(model, facts, rowset, layer_ids, dtype)
    manifest = dataclasses.replace(manifest, engine={"name": engine.name, **engine.versions()})
    report = ExtractReport(store, len(rowset.rows), 0, 0)
    console = Console(file=io.StringIO())
    with (
        StoreWriter(store, manifest, rowset.rows, 16384) as writer,
        CaptureProgress(console, 1) as progress,
    ):
        capture_shards(
            engine,
            writer,
            layer_ids,
            batch_tokens=batch_tokens,
            store_dtype=getattr(torch, dtype),
            report=report,
            progress=progress,
        )
        if report.lost:
            sys.exit(f"the engine lost {report.lost}")
        writer.finish()
    reader = StoreReader(store, verify="full")
    result = []
    for i, row in enumerate(rowset.rows):
        read = reader.read(i)
        assert read["input_ids"].tolist() == list(row.input_ids)
        aux, last = read["aux_hidden_states"].float(), read["verifier_last_hidden_states"].float()
        result.append(by_layer(aux, last, layer_ids, facts.hidden_size))
    return result


def cuts_of(i: int, row: Row, count: int) -> list[tuple[int, int]]:
    """(row, last position fed): the end of every served prompt, and places spread over the row."""
    mask = row.loss_mask
    served = {t for t in range(len(mask) - 1) if mask[t] == 0 and mask[t + 1] == 1}
    spread = {(len(mask) - 1) * (j + 1) // (count + 1) for j in range(count)}
    return [(i, t) for t in sorted(served | spread)]


def next_tokens(
    prompts: Sequence[tuple[int, int]],
    chosen: Sequence[int],
    stored: Sequence[Layers],
    fp32: Sequence[Layers],
    path: Path,
    facts: VerifierFacts,
    dtype: str,
) -> dict[str, object]:
    """The engine's own greedy token against norm and head of the stored last state at the same place."""
    edge = load_edge_weights(facts, parts=("head", "norm"))
    same, same_fp32, gaps = 0, 0, []
    for (i, t), token in zip(prompts, chosen, strict=True):
        logits = verifier_logits(stored[i]["last"][t], edge, facts.rms_norm_eps)
        same += int(logits.argmax()) == token
        same_fp32 += int(verifier_logits(fp32[i]["last"][t], edge, facts.rms_norm_eps).argmax()) == token
        if int(logits.argmax()) != token:
            gaps.append(round(float(logits.max() - logits[token]), 4))
    return {
        "capture": "next token",
        "prompts": len(prompts),
        "conversations": len({i for i, _ in prompts}),
        "argmax_agreement": same / len(prompts),
        "argmax_agreement_hf_fp32": same_fp32 / len(prompts),
        "logit_gaps_of_disagreements": sorted(gaps, reverse=True),
        "dtype": dtype,
    }


if __name__ == "__main__":
    main()
