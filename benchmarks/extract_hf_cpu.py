"""The Hugging Face backend into a finished store beside the bare forward of the same batches, on CPU, in turns.

python benchmarks/extract_hf_cpu.py --out benchmarks/results/extract_hf_cpu.json

Rows are SmolLM2's own demo conversations; the forward is fp32 without the head, as the backend runs it.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from common import ROOT, write_results
from rich.console import Console
from torch import Tensor

from eagle3lab.config.schema import DataConfig, ModelConfig, VerifierSource
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract.batches import padding_share, plan_batches
from eagle3lab.extract.capture import capture_shards
from eagle3lab.extract.pipeline import plan_manifest
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.extract.report import ExtractReport
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import RowSet
from eagle3lab.store.manifest import Manifest
from eagle3lab.store.plan import plan_shards
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.locate import locate_verifier

LAYER_IDS = {"smollm2_135m": (2, 15, 27), "tiny": (1, 2, 3)}
FILES = {
    "smollm2_135m": "asset:demo/conversations.jsonl.xz",
    "tiny": "asset:tiny_chat/conversations.jsonl.xz",
}
BATCH_TOKENS, SHARD_TOKENS = 2048, 16384  # the defaults of extract.py


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/extract_hf_cpu.json")
    parser.add_argument("--model", choices=sorted(FILES), default="smollm2_135m")
    parser.add_argument("--tokens", type=int, default=12000)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()

    model = ModelConfig(name=arguments.model, source=VerifierSource(arguments.model))
    path = locate_verifier(model)
    facts = read_facts(path)
    data = DataConfig(name="demo", paths=[FILES[arguments.model]], max_len=512, max_tokens=arguments.tokens)
    rowset = build_rows(data, model, facts)
    tokens = sum(len(row.input_ids) for row in rowset.rows)
    shards = plan_shards(rowset.rows, SHARD_TOKENS)
    batches = [batch for shard in shards for batch in padded_batches([row.input_ids for row in shard])]
    engine = HuggingFaceEngine(path, facts)
    manifest = plan_manifest(model, facts, rowset, LAYER_IDS[arguments.model], "bfloat16")
    manifest = dataclasses.replace(manifest, engine={"name": engine.name, **engine.versions()})
    print(f"{len(rowset.rows)} rows, {tokens:,} tokens, {len(batches)} batches", flush=True)

    bare_forward(engine, batches[-1:])  # warm
    bare, rows = [bare_forward(engine, batches)], []
    for _ in range(arguments.rounds):
        directory = Path(tempfile.mkdtemp(prefix="eagle3lab-bench-"))
        spent, stages = into_a_store(engine, directory / "store", manifest, rowset)
        num_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
        shutil.rmtree(directory)
        bare.append(bare_forward(engine, batches))
        beside = Spent(  # of the two bare rounds around it
            (bare[-2].seconds + bare[-1].seconds) / 2, (bare[-2].cpu_seconds + bare[-1].cpu_seconds) / 2
        )
        rows.append(
            {
                "backend": "hf",
                "plain_tok_s": round(tokens / beside.seconds, 1),
                "extract_tok_s": round(tokens / spent.seconds, 1),
                "ratio": round(beside.seconds / spent.seconds, 4),
                "gb_s": round(num_bytes / spent.seconds / 1e9, 5),
                "cpu_ratio": round(beside.cpu_seconds / spent.cpu_seconds, 4),
                "seconds": stages,
            }
        )
        print(rows[-1], flush=True)
    ratio = statistics.median(row["ratio"] for row in rows)
    print(f"median ratio {ratio}")
    lengths = [len(row.input_ids) for row in rowset.rows]
    write_results(
        arguments.out,
        rows,
        notes={
            "model": arguments.model,
            "median_ratio": ratio,
            "bare_tok_s": [round(tokens / spent.seconds, 1) for spent in bare],
            "rows": len(rowset.rows),
            "tokens": tokens,
            "padding_share": round(padding_share(lengths, BATCH_TOKENS), 4),
            "threads": torch.get_num_threads(),
        },
    )


def padded_batches(rows: Sequence[Sequence[int]]) -> list[Tensor]:
    """Token ids [rows, longest] of every batch that the backend forms of one shard."""
    batches = []
    for batch in plan_batches([len(row) for row in rows], BATCH_TOKENS):
        ids = torch.zeros(len(batch), max(len(rows[i]) for i in batch), dtype=torch.int64)
        for place, i in enumerate(batch):
            ids[place, : len(rows[i])] = torch.tensor(rows[i])
        batches.append(ids)
    return batches


@dataclass(frozen=True)
class Spent:
    """Wall clock, and processor time of all threads: the latter bears other programs on the machine."""

    seconds: float
    cpu_seconds: float

    @classmethod
    def since(cls, start: tuple[float, float]) -> Spent:
        return cls(time.perf_counter() - start[0], time.process_time() - start[1])


def now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def bare_forward(engine: HuggingFaceEngine, batches: Sequence[Tensor]) -> Spent:
    """The decoder over all batches, nothing kept; in a thread of its own, as the backend runs."""

    def run() -> Spent:
        start = now()
        with torch.inference_mode():
            for ids in batches:
                engine.model.model(input_ids=ids, use_cache=False)
        return Spent.since(start)

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(run).result()


def into_a_store(
    engine: HuggingFaceEngine, store: Path, manifest: Manifest, rowset: RowSet
) -> tuple[Spent, dict[str, float]]:
    """From the first request to the finished store, and the seconds that each stage waited."""
    report = ExtractReport(store, len(rowset.rows), 0, 0)
    console = Console(file=io.StringIO())
    with (
        StoreWriter(store, manifest, rowset.rows, SHARD_TOKENS) as writer,
        CaptureProgress(console, 1) as progress,
    ):
        start = now()
        capture_shards(
            engine,
            writer,
            manifest.layer_ids,
            batch_tokens=BATCH_TOKENS,
            store_dtype=torch.bfloat16,
            report=report,
            progress=progress,
        )
        assert not report.lost
        writer.finish()
        spent = Spent.since(start)
    return spent, {name: round(value, 3) for name, value in report.seconds.items()}


if __name__ == "__main__":
    main()
