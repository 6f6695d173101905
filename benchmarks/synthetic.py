"""A verifier of a given width with random weights, and a store of its real hidden states, for throughput runs.

The widths that cost time (hidden, ffn, heads, vocabulary) are real; only the depth is small, so that the
alignment self-test runs as it does on any other store.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from eagle3lab.config.schema import Shapes
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract.pipeline import verifier_identity
from eagle3lab.rows.rows import Row
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest
from eagle3lab.store.writer import StoreWriter
from eagle3lab.verifier.facts import read_facts

QWEN3_8B = Shapes(4096, 12288, 4, 32, 8, 128, 151936, 2_000_000_000)  # 4 layers instead of 36
LAYER_IDS = (1, 2, 3)


def qwen3_config(shapes: Shapes, **fields: Any) -> Qwen3Config:
    """Of a verifier with these shapes and untied embeddings."""
    return Qwen3Config(
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.intermediate_size,
        num_hidden_layers=shapes.num_layers,
        num_attention_heads=shapes.num_heads,
        num_key_value_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        vocab_size=shapes.vocab_size,
        max_position_embeddings=40960,
        tie_word_embeddings=False,
        **fields,
    )


def make_verifier(directory: Path, shapes: Shapes, device: str) -> None:
    """Random bf16 weights under `directory`, as a Hugging Face folder without a tokenizer."""
    config = qwen3_config(shapes)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(directory)


def make_rows(num_rows: int, length: int, vocab_size: int, supervised_share: float) -> list[Row]:
    """Random conversations of `length` tokens whose last `supervised_share` is supervised."""
    generator = torch.Generator().manual_seed(1)
    rows = []
    for i in range(num_rows):
        ids = tuple(torch.randint(10, vocab_size, (length,), generator=generator).tolist())
        prompt = round(length * (1 - supervised_share))
        mask = tuple([0] * prompt + [1] * (length - prompt))
        conversation = hashlib.sha256(str(i).encode()).hexdigest()
        rows.append(Row(row_id_of(ids, mask), conversation, f"synthetic:{i}", "train", ids, mask))
    return rows


def make_store(
    store: Path,
    verifier: Path,
    rows: list[Row],
    device: str,
    batch_rows: int = 8,
    dtype: str = "bfloat16",
) -> int:
    """Capture `rows` with the Hugging Face backend in bf16 and write them; returns the number of tokens."""
    facts = read_facts(verifier)
    engine = HuggingFaceEngine(verifier, facts, torch.bfloat16, device, False)
    manifest = Manifest(
        verifier=verifier_identity(facts, "synthetic"),
        tokenizer_hash="none",
        template_hash="none",
        template_args_hash="none",
        layer_ids=LAYER_IDS,
        dtype=dtype,
        engine={"name": engine.name, **engine.versions()},
        accounting={"read": len(rows), "kept": len(rows), "dropped": {}},
    )
    with StoreWriter(store, manifest, rows, 65536) as writer:
        for index, shard in writer.pending():
            captured = []
            for start in range(0, len(shard), batch_rows):
                part = shard[start : start + batch_rows]
                states = engine.capture([row.input_ids for row in part], LAYER_IDS)
                captured += [(r, s.aux, s.last, s.token_ids) for r, s in zip(part, states, strict=True)]
            writer.write_shard(index, captured)
        writer.finish()
    engine.close()
    return sum(len(row.input_ids) for row in rows)


def train_words(verifier: Path, store: Path, *, seq_len: int, ttt_steps: int) -> list[str]:
    """What `train.py` must be told of such a verifier and its store."""
    return [
        "model=local", "model.name=synthetic", f"model.path={verifier}", "data=jsonl", "data.paths=[none]",
        f"store={store}", f"draft.ttt_steps={ttt_steps}", f"draft.aux_layer_ids=[{','.join(map(str, LAYER_IDS))}]",
        f"train.seq_len={seq_len}",
    ]  # fmt: skip
