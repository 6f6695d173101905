"""A checkpoint with random weights that extract.py takes like any other, and conversations of an exact length."""

from __future__ import annotations

import contextlib
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from common import ROOT
from synthetic import qwen3_config
from transformers import Qwen3ForCausalLM

from eagle3lab.config.schema import DataConfig, ModelConfig, Shapes
from eagle3lab.rows.build import build_rows
from eagle3lab.verifier.facts import read_facts

TOKENIZER = ROOT / "tests/cases/_shared/tok_bytes"  # byte b is token b, so that lengths are exact
TEMPLATE = ROOT / "tests/cases/_shared/templates/plain.jinja"
END_TOKEN = 258


def rows_of(verifier: Path, conversations: Path, length: int) -> list[tuple[int, ...]]:
    """The token ids that `extract.py` will make of the conversations, every one of `length`."""
    model = ModelConfig(name="synthetic", path=str(verifier), template=str(TEMPLATE))
    data = DataConfig(name="synthetic", paths=[str(conversations)], max_len=length)
    rows = [row.input_ids for row in build_rows(data, model, read_facts(verifier)).rows]
    assert {len(row) for row in rows} == {length}, "the prompts are not of the length asked for"
    return rows


def make_conversations(target: Path, number: int, length: int) -> None:
    """One question and one answer each, half of the tokens an answer."""
    source = random.Random(0)
    # a row holds, beside the texts, two turn tokens, two end tokens, two newlines and the names of the roles
    answer = length // 2
    question = length - answer - len("user\n") - len("assistant\n") - 6
    lines = []
    for _ in range(number):
        texts = ("".join(source.choices("abcdefghij klmnop qrstuv wxyz", k=n)) for n in (question, answer))
        words = [text.strip().ljust(n, ".") for text, n in zip(texts, (question, answer), strict=True)]
        messages = [{"role": r, "content": w} for r, w in zip(("user", "assistant"), words, strict=True)]
        lines.append(json.dumps({"messages": messages}))
    target.write_text("\n".join(lines) + "\n")


def make_verifier(directory: Path, shapes: Shapes, device: str) -> None:
    """Random bf16 weights as a Hugging Face folder, with a tokenizer of bytes.

    Branches are scaled down by their number, as trained networks begin: without it rounding alone moves the
    states of 36 random layers by several percent, and the self-test would say so.
    """
    config = qwen3_config(shapes, bos_token_id=256, eos_token_id=END_TOKEN)
    torch.manual_seed(0)
    with torch.device(device), default_dtype(torch.bfloat16), torch.no_grad():
        model = Qwen3ForCausalLM(config)
        model.model.embed_tokens.weight.normal_()
        for layer in model.model.layers:
            for branch in (layer.self_attn.o_proj, layer.mlp.down_proj):
                branch.weight.mul_((2 * shapes.num_layers) ** -0.5)
    model.save_pretrained(directory, max_shard_size="2GB")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, directory / name)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """New floating tensors are of `dtype` within the block."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
