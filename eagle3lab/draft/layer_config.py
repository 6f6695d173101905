"""The configuration of the draft's decoder layers, derived from the verifier's facts."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.config.plan_sizes import draft_heads, llama_heads
from eagle3lab.config.schema import DraftConfig, LayerType
from eagle3lab.verifier.facts import VerifierFacts

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def draft_rope(facts: VerifierFacts) -> dict[str, Any]:
    """The verifier's rotary parameters, for full rotation of every head.

    A partial rotation is the verifier's business: the draft's own heads rotate completely, in
    transformers' llama and qwen3 layers as in vLLM's, so the share must not reach the draft's file.
    """
    rope = copy.deepcopy(facts.rope_parameters)
    rope.pop("partial_rotary_factor", None)
    # Hunyuan's: vLLM would stretch the draft's positions by it, transformers trains without.
    rope.pop("alpha", None)
    return rope


def layer_config(cfg: DraftConfig, facts: VerifierFacts, *, num_aux: int) -> PretrainedConfig:
    """A Llama or Qwen3 configuration with the verifier's width, positions, RoPE, norm and vocabulary.

    Sizes left None in `cfg` are the verifier's own. Raises UserError with every impossible size.
    """
    from transformers import LlamaConfig, Qwen3Config

    num_heads = draft_heads(cfg, facts.hidden_size, facts.num_heads, facts.num_kv_heads)
    num_kv_heads = cfg.num_kv_heads or min(facts.num_kv_heads, num_heads)
    head_dim = cfg.head_dim or facts.head_dim
    raise_all(_problems(cfg, facts, num_heads, num_kv_heads, head_dim))

    values: dict[str, Any] = {
        "vocab_size": facts.vocab_size,
        "hidden_size": facts.hidden_size,
        "intermediate_size": cfg.intermediate_size or facts.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "rms_norm_eps": facts.rms_norm_eps,
        "max_position_embeddings": facts.max_positions,
        "rope_parameters": draft_rope(facts),
        "attention_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": facts.bos_token_id,
        "eos_token_id": list(facts.eos_token_ids) or None,
        # A padding id would only zero a row's gradient, and the embedding is frozen.
        "pad_token_id": None,
    }
    if cfg.sliding_window is not None:
        values["sliding_window"] = cfg.sliding_window
        values["layer_types"] = ["sliding_attention"] * cfg.num_layers
    if cfg.layer_type is LayerType.qwen3:
        values["use_sliding_window"] = cfg.sliding_window is not None
        make: type[PretrainedConfig] = Qwen3Config
    else:
        make = LlamaConfig
    config = _with_rotation(make, values)
    if num_aux != 3:
        # vLLM sizes the first projection by this key and assumes 3 without it.
        config.num_aux_hidden_states = num_aux
    return config


def _with_rotation(make: type[PretrainedConfig], values: dict[str, Any]) -> PretrainedConfig:
    """The configuration; raises UserError where transformers cannot make frequencies of its rotary parameters."""
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    try:
        config = make(**values)
        LlamaRotaryEmbedding(config)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        rope = values["rope_parameters"]
        factors, head_dim = rope.get("short_factor"), values["head_dim"]
        what = "the draft cannot take over the verifier's rotary embedding"
        if isinstance(factors, list) and 2 * len(factors) != head_dim:
            said = f"{len(factors)} factors of {rope['rope_type']} for heads of {head_dim}"
            fix = f"draft.head_dim={2 * len(factors)}"
            raise UserError(Problem(what, said, "one for every two of a head's values", fix)) from error
        said = f"{rope} ({type(error).__name__}: {error})"
        raise UserError(Problem(what, said, "one that transformers makes frequencies of")) from error
    return config


def _problems(
    cfg: DraftConfig, facts: VerifierFacts, num_heads: int, num_kv_heads: int, head_dim: int
) -> list[Problem]:
    problems = []
    if num_heads % num_kv_heads:
        problems.append(
            Problem(
                "draft.num_kv_heads does not divide the number of heads",
                num_kv_heads,
                f"a divisor of {num_heads}",
                f"draft.num_kv_heads={num_heads}",
            )
        )
    if head_dim % 2:
        problems.append(Problem("draft.head_dim", head_dim, "an even number, for RoPE", "draft.head_dim=128"))
    problems += llama_heads(cfg, facts.hidden_size, num_heads)
    if cfg.num_layers < 1:
        problems.append(Problem("draft.num_layers", cfg.num_layers, "at least 1", "draft.num_layers=1"))
    if cfg.sliding_window is not None and cfg.sliding_window < 1:
        problems.append(
            Problem("draft.sliding_window", cfg.sliding_window, "at least 1", "draft.sliding_window=null")
        )
    if cfg.norm_before_fc and cfg.fc_norm:
        problems.append(
            Problem(
                "draft.norm_before_fc and draft.fc_norm are both set",
                expected="one norm in front of the first projection",
                fix="draft.fc_norm=false",
            )
        )
    return problems
