"""The exported draft as an engine reads it: which key is looked up where, which tensor has which shape.

Written from vLLM's reader (speculators' eagle3 entry and the llama/qwen3 EAGLE-3 models), and not from the
code that builds the model, so that a file can be held against it before an engine has to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3lab.config.errors import Problem
from eagle3lab.draft.vocabulary import mapping_fault

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
PROVENANCE_FILE = "provenance.json"

_LAYER_KEYS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "model_type",
    "rope_parameters",
)
_COUNTS = (*_LAYER_KEYS[:7], "max_position_embeddings")
_TOP_KEYS = ("speculators_model_type", "speculators_config", "transformer_layer_config", "draft_vocab_size")
# The engine's fallbacks differ from the training library's, so each flag must be in the file.
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_TYPES = ("llama", "qwen3")
_MAPS = ("d2t", "t2d")
_PLAIN_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# A draft with one of these all zero proposes one token for ever. A zero attention or MLP output is legal.
_NEVER_ZERO = ("fc.weight", "embed_tokens.weight", "lm_head.weight", "norm.weight")


@dataclass(frozen=True)
class DraftShape:
    """What an engine takes from config.json."""

    layer_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    num_aux: int
    aux_layer_ids: tuple[int, ...] | None  # None: the engine falls back on its own default layers
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool


def engine_view(config: Mapping[str, Any]) -> DraftShape:
    """config.json with the engine's own lookups and fallbacks. Raises KeyError for a key it cannot do without."""
    layer = config["transformer_layer_config"]
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    return DraftShape(
        layer_type=layer["model_type"],
        hidden_size=layer["hidden_size"],
        intermediate_size=layer["intermediate_size"],
        num_layers=layer["num_hidden_layers"],
        num_heads=layer["num_attention_heads"],
        num_kv_heads=layer["num_key_value_heads"],
        head_dim=layer["head_dim"],
        vocab_size=layer["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or layer["vocab_size"],
        num_aux=layer.get("num_aux_hidden_states") or 3,
        aux_layer_ids=tuple(ids) if ids else None,
        norm_before_residual=config.get("norm_before_residual", True),
        norm_before_fc=config.get("norm_before_fc", False),
        fc_norm=config.get("fc_norm", False),
        norm_output=config.get("norm_output", False),
    )


def config_problems(config: Mapping[str, Any]) -> list[Problem]:
    """Every key of config.json that is missing or contradicts another."""
    layer = config.get("transformer_layer_config")
    layer = layer if isinstance(layer, Mapping) else {}
    problems = [Problem(f"{CONFIG_FILE} has no {k}") for k in (*_TOP_KEYS, *_FLAGS) if config.get(k) is None]
    problems += [
        Problem(f"{CONFIG_FILE} has no transformer_layer_config.{k}")
        for k in _LAYER_KEYS
        if layer.get(k) is None
    ]
    if not problems:
        problems = _kind_problems(config, layer)
    if problems:
        return problems + _id_problems(config, layer)
    if config["speculators_model_type"] != "eagle3":
        problems.append(Problem("not an EAGLE-3 draft", config["speculators_model_type"], "eagle3"))
    if layer["model_type"] not in _LAYER_TYPES:
        problems.append(Problem("the draft's layer type", layer["model_type"], " or ".join(_LAYER_TYPES)))
    rope = layer["rope_parameters"]
    problems += [
        Problem(f"rope_parameters has no {k}", rope)
        for k in ("rope_type", "rope_theta")
        if rope.get(k) is None
    ]
    verifier = config["speculators_config"]["verifier"]
    problems += [
        Problem(f"speculators_config.verifier has no {k}")
        for k in ("name_or_path", "architectures")
        if not verifier.get(k)
    ]
    return problems + _id_problems(config, layer)


def _kind_problems(config: Mapping[str, Any], layer: Mapping[str, Any]) -> list[Problem]:
    """Values of another kind than an engine computes with."""
    counts = {k: layer[k] for k in _COUNTS} | {"draft_vocab_size": config["draft_vocab_size"]}
    problems = [
        Problem(f"{CONFIG_FILE}: {k}", v, "a whole number above 0")
        for k, v in counts.items()
        if type(v) is not int or v < 1
    ]
    problems += [
        Problem(f"{CONFIG_FILE}: {k}", config[k], "true or false")
        for k in _FLAGS
        if type(config[k]) is not bool
    ]
    parts = {
        "rope_parameters": layer["rope_parameters"],
        "speculators_config": config["speculators_config"],
    }
    problems += [
        Problem(f"{CONFIG_FILE}: {k}", v, "a JSON object")
        for k, v in parts.items()
        if not isinstance(v, Mapping)
    ]
    if not problems and not isinstance(verifier := config["speculators_config"].get("verifier"), Mapping):
        problems.append(Problem(f"{CONFIG_FILE}: speculators_config.verifier", verifier, "a JSON object"))
    return problems


def _id_problems(config: Mapping[str, Any], layer: Mapping[str, Any]) -> list[Problem]:
    ids = config.get("eagle_aux_hidden_state_layer_ids")
    if not ids:
        return [
            Problem(
                "eagle_aux_hidden_state_layer_ids is not named at the top level of config.json",
                expected="the layers the draft was trained on; without them an engine takes its own defaults",
            )
        ]
    if not isinstance(ids, list) or any(type(i) is not int for i in ids):
        return [Problem("eagle_aux_hidden_state_layer_ids", ids, "a list of layer numbers")]
    num_aux = layer.get("num_aux_hidden_states") or 3
    if num_aux != len(ids):
        return [
            Problem(
                "transformer_layer_config.num_aux_hidden_states", num_aux, f"{len(ids)}, one per layer id"
            )
        ]
    return []


def expected_tensors(shape: DraftShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the file, the vocabulary maps of a pruned draft included."""
    hidden, mlp, kv = shape.hidden_size, shape.intermediate_size, shape.num_kv_heads * shape.head_dim
    heads = shape.num_heads * shape.head_dim
    tensors: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (shape.vocab_size, hidden),
        "lm_head.weight": (shape.draft_vocab_size, hidden),
        "norm.weight": (hidden,),
        "fc.weight": (hidden, shape.num_aux * hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if shape.norm_before_fc:
        tensors["input_norm.weight"] = (shape.num_aux * hidden,)
    if shape.fc_norm:
        tensors |= {f"fc_norm.{i}.weight": (hidden,) for i in range(shape.num_aux)}
    if shape.draft_vocab_size != shape.vocab_size:
        tensors |= {"t2d": (shape.vocab_size,), "d2t": (shape.draft_vocab_size,)}
    for index in range(shape.num_layers):
        prefix = f"layers.{index}."
        # The first layer attends over [embedding, state]; further ones over the state alone.
        width = 2 * hidden if index == 0 else hidden
        tensors |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (heads, width),
            f"{prefix}self_attn.k_proj.weight": (kv, width),
            f"{prefix}self_attn.v_proj.weight": (kv, width),
            f"{prefix}self_attn.o_proj.weight": (hidden, heads),
            f"{prefix}mlp.gate_proj.weight": (mlp, hidden),
            f"{prefix}mlp.up_proj.weight": (mlp, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, mlp),
        }
        if shape.layer_type == "qwen3":
            tensors |= {f"{prefix}self_attn.{n}_norm.weight": (shape.head_dim,) for n in ("q", "k")}
    return tensors


def all_finite(tensor: Tensor) -> bool:
    """Whether no element is NaN or infinite, in one pass and without a copy, unlike `isfinite(tensor).all()`."""
    return all(bool(torch.isfinite(end)) for end in torch.aminmax(tensor.detach()))


def tensor_problems(shape: DraftShape, tensors: Mapping[str, Tensor]) -> list[Problem]:
    """Every tensor that is missing, unexpected, of another shape, not finite, all zero, or a wrong map."""
    expected = expected_tensors(shape)
    problems = [
        Problem(
            f"{name} is missing",
            expected=f"shape {wanted}"
            + (f": {shape.draft_vocab_size} of {shape.vocab_size} tokens" if name in ("d2t", "t2d") else ""),
        )
        for name, wanted in expected.items()
        if name not in tensors
    ]
    problems += [Problem(f"{name} has no place in this draft") for name in tensors if name not in expected]
    for name in expected.keys() & tensors.keys():
        tensor = tensors[name]
        if tuple(tensor.shape) != expected[name]:
            problems.append(Problem(f"{name} has another shape", tuple(tensor.shape), str(expected[name])))
        elif name not in _MAPS and tensor.dtype not in _PLAIN_DTYPES:
            problems.append(Problem(f"{name} is {tensor.dtype}", expected="bf16, fp16 or fp32"))
        elif tensor.is_floating_point() and not all_finite(tensor):
            problems.append(Problem(f"{name} is not finite"))
        elif name in _NEVER_ZERO and not any(torch.aminmax(tensor)):
            problems.append(Problem(f"{name} is all zero"))
    if "t2d" in tensors and "d2t" in tensors:
        fault = mapping_fault(tensors["t2d"], tensors["d2t"])
        if fault is not None:
            problems.append(Problem(fault))
    return sorted(problems, key=lambda p: p.what)
