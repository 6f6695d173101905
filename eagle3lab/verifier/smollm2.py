"""SmolLM2-135M-Instruct: from the GGUF file inside its package to a Hugging Face directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.verifier.folder import bpe_tokenizer, llama_config, write_model_folder
from eagle3lab.verifier.gguf import Gguf, open_gguf, read_tensor

# Part of a converted directory's identity: raise it whenever the bytes written change.
CONVERTER_VERSION = 1

# bf16 keeps 8 bits of a value that was stored in 4 or 8: everything downstream uses these values.
DTYPE = torch.bfloat16

_CONTROL_TOKEN = 3  # ggml's token type of control tokens
_EDGE_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_smollm2(gguf: Path, directory: Path) -> None:
    """Write the model in `gguf` (a Llama with a byte-level BPE tokenizer) into the existing `directory`.

    Raises `IntegrityError` where the file is another kind of model.
    """
    file = open_gguf(gguf)
    meta = file.metadata
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "smollm"):
        wanted = "('llama', 'smollm')"
        raise IntegrityError(Problem(f"{gguf} holds architecture and pre-tokenizer", kind, wanted))
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    tensors = _tensors(file)
    write_model_folder(
        directory,
        tensors=tensors,
        config=_config(meta, len(tokens), tied="lm_head.weight" not in tensors),
        tokenizer=_tokenizer(meta),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "unk_token": tokens[meta["tokenizer.ggml.unknown_token_id"]],
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
        },
        chat_template=meta["tokenizer.chat_template"],
    )


def _tensors(file: Gguf) -> dict[str, Tensor]:
    heads = {
        "attn_q": file.metadata["llama.attention.head_count"],
        "attn_k": file.metadata["llama.attention.head_count_kv"],
    }
    tensors: dict[str, Tensor] = {}
    for source in file.tensors:
        values = read_tensor(file, source)
        name = _EDGE_NAMES.get(source)
        if name is None:
            _, layer, part, _ = source.split(".")
            name = f"model.layers.{layer}.{_LAYER_NAMES[part]}.weight"
            if part in heads:
                values = half_split_rotary(values, heads[part])
        tensors[name] = torch.from_numpy(np.ascontiguousarray(values)).to(DTYPE)
    return tensors


def half_split_rotary(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Reorder a query or key projection from interleaved to half-split rotary pairs.

    `weight` [num_heads * head_dim, hidden_size]: in each head rows (0, 1), (2, 3), ... are rotated
    together; Hugging Face rotates row i with row i + head_dim / 2.
    """
    pairs = weight.shape[0] // num_heads // 2
    # shape: [num_heads, head_dim / 2, 2, hidden_size]
    split = weight.reshape(num_heads, pairs, 2, weight.shape[1])
    return split.swapaxes(1, 2).reshape(weight.shape)


def _config(meta: dict[str, Any], vocab_size: int, *, tied: bool) -> dict[str, Any]:
    num_heads = meta["llama.attention.head_count"]
    return llama_config(
        dtype=DTYPE,
        # Stored as fp32: the nearest short decimal is what the model was trained with.
        rope_theta=_short(meta["llama.rope.freq_base"]),
        rms_norm_eps=_short(meta["llama.attention.layer_norm_rms_epsilon"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=num_heads,
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        head_dim=meta["llama.embedding_length"] // num_heads,
        max_position_embeddings=meta["llama.context_length"],
        vocab_size=vocab_size,
        tie_word_embeddings=tied,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def _tokenizer(meta: dict[str, Any]) -> dict[str, Any]:
    """Byte-level BPE after splitting off single digits: ggml's pre-tokenizer `smollm`."""
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    return bpe_tokenizer(
        vocabulary=tokens,
        merges=[merge.split(" ", 1) for merge in meta["tokenizer.ggml.merges"]],
        special=[token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN],
        unknown=None,
        normalizer=None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": [digits, byte_level]},
        decoder=byte_level,
    )
