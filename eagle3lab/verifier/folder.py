"""Writing a Llama-type model as a Hugging Face directory, each file complete on disk before the next."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

_GENERATION_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_model_folder(
    directory: Path,
    *,
    tensors: Mapping[str, Tensor],
    config: Mapping[str, Any],
    tokenizer: Mapping[str, Any],
    tokenizer_config: Mapping[str, Any],
    chat_template: str,
) -> None:
    """Write model.safetensors, config, generation_config, tokenizer, tokenizer_config and chat_template.

    `directory` exists and is not read by anyone yet: the caller renames it. The same input gives the
    same bytes.
    """
    write_json(directory / "config.json", config)
    weights = directory / "model.safetensors"
    save_file(dict(tensors), weights, metadata={"format": "pt"})
    shutil.copymode(directory / "config.json", weights)  # save_file leaves it readable by its owner only
    sync(weights)
    write_json(directory / "generation_config.json", {key: config[key] for key in _GENERATION_KEYS})
    write_json(directory / "tokenizer.json", tokenizer)
    write_json(directory / "tokenizer_config.json", tokenizer_config)
    write_text(directory / "chat_template.jinja", chat_template)


def llama_config(*, dtype: torch.dtype, rope_theta: float, **shapes: object) -> dict[str, Any]:
    """config.json of a Llama without biases, plus what the caller states."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "dtype": str(dtype).removeprefix("torch."),
        "rope_parameters": {"rope_theta": rope_theta, "rope_type": "default"},
        **shapes,
    }


def bpe_tokenizer(
    *,
    vocabulary: list[str],
    merges: list[list[str]],
    special: list[str],
    unknown: str | None,
    normalizer: object,
    pre_tokenizer: object,
    decoder: object,
) -> dict[str, Any]:
    """tokenizer.json of a BPE tokenizer that adds no token by itself: chat templates write theirs."""
    ids = {token: i for i, token in enumerate(vocabulary)}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[token], "content": token, **flags} for token in special],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": decoder,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": ids,
            "merges": merges,
        },
    }


def write_json(file: Path, value: object) -> None:
    write_text(file, json.dumps(value, indent=1, ensure_ascii=False) + "\n")


def write_text(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
    sync(file)


def file_sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def sync(file: Path) -> None:
    """Force a written file to the disk, so that a later rename never publishes half of it."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
