"""What a verifier's config.json says, under one set of names. JSON only: no torch, no transformers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError, raise_all
from eagle3lab.verifier.checkpoint import weight_fingerprint
from eagle3lab.verifier.rope import normalised_rope

__all__ = ["VerifierFacts", "read_facts", "weight_fingerprint"]

# Where multimodal configurations keep their language model.
_TEXT_PARTS = ("text_config", "llm_config", "language_config")

# Model types whose RMSNorm multiplies by (1 + weight). A list and not a rule: gemma3n, gemma4 and
# every other Qwen are plain. Compared with transformers' own modules in the tests.
PLUS_ONE_NORM_TYPES = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "vaultgemma",
        "qwen3_next",
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "minimax_m3_vl",
        "minimax_m3_vl_text",
        "step3p5",
    }
)
# Model types that tie head and embedding unless config.json says otherwise.
_TIED_BY_DEFAULT = frozenset({"gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma"})

# What published files leave to the class of their type (gemma-3-4b-it states neither heads nor vocabulary).
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
    },
}

# Keys with a neutral value: anything else changes logits after the head, which `verifier_logits` and
# the draft's training target would silently leave out.
_NEUTRAL_LOGIT_KEYS: dict[str, tuple[object, ...]] = {
    "final_logit_softcapping": (None,),
    "logits_soft_cap": (None,),
    "logits_scaling": (None, 1, 1.0),
    "logit_scale": (None, 1, 1.0),
    "lm_head_multiplier": (None, 1, 1.0),
}

# Written or rewritten by the library that saved the file; they say nothing about the model.
_VOLATILE_KEYS = frozenset(
    {
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_commit_hash",
        "_from_model_config",
        "_name_or_path",
        "dtype",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


@dataclass(frozen=True)
class VerifierFacts:
    """Shapes and ids of a verifier; of its text part where the configuration is nested.

    For multi-head latent attention (DeepSeek, Kimi) `head_dim` is the value head's and `num_kv_heads`
    equals `num_heads`: the dense attention it expands to, which is what a dense draft can copy.
    """

    path: Path
    architecture: str
    model_type: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool
    norm_offset: float
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    config_hash: str
    kv_lora_rank: int | None = None  # of latent attention, for the size of its cache
    qk_rope_head_dim: int | None = None


class _Keys:
    """Reads numbers out of a mapping and collects what is missing or of the wrong kind."""

    def __init__(self, values: Mapping[str, Any], where: Path) -> None:
        self.values, self.where, self.problems = values, where, list[Problem]()

    def integer(self, *names: str, default: int | None = None) -> int:
        return int(self._number(names, "a whole number above 0", default, whole=True))

    def real(self, *names: str, missing: str = "") -> float:
        return self._number(names, missing or "a number above 0", None, whole=False)

    def _number(self, names: tuple[str, ...], expected: str, default: int | None, whole: bool) -> float:
        name = next((n for n in names if self.values.get(n) is not None), None)
        if name is None and default is not None:
            return default
        value = None if name is None else self.values[name]
        right_kind = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
        if not right_kind or not 0 < value < math.inf:  # type: ignore[operator]
            what = f"{self.where} has no {names[0]}" if name is None else f"{self.where}: {name}"
            self.problems.append(Problem(what, value, expected))
            return 1
        return value  # type: ignore[return-value]


def read_facts(path: Path) -> VerifierFacts:
    """Read config.json (and generation_config.json where there is one) of the directory `path`.

    Raises `UserError` with every problem found: no directory, no config.json, missing keys, shapes
    that contradict each other, or an output transform this package does not reproduce.
    """
    path = Path(path).expanduser()
    config = read_json(path, "config.json")
    generation = read_json(path, "generation_config.json", required=False)
    text = _text_part(config)
    keys = _Keys(text, path / "config.json")

    hidden_size, num_heads = keys.integer("hidden_size"), keys.integer("num_attention_heads")
    if text.get("kv_lora_rank") is not None:
        num_kv_heads, head_dim = num_heads, keys.integer("v_head_dim")
    else:
        num_kv_heads = keys.integer("num_key_value_heads", default=num_heads)
        head_dim = keys.integer("head_dim", default=max(1, hidden_size // num_heads))
        if num_heads % num_kv_heads:
            keys.problems.append(
                Problem(f"{keys.where}: num_key_value_heads", num_kv_heads, f"a divisor of {num_heads} heads")
            )
    for name, neutral in _NEUTRAL_LOGIT_KEYS.items():
        if text.get(name) not in neutral:
            keys.problems.append(
                Problem(
                    f"{keys.where}: {name}",
                    text[name],
                    "a verifier whose logits are its head's output; this transform of them is not supported",
                )
            )

    model_type = str(text.get("model_type") or config.get("model_type") or "")
    architectures = text.get("architectures") or config.get("architectures") or [""]
    if not isinstance(architectures, list):
        keys.problems.append(Problem(f"{keys.where}: architectures", architectures, "a list of class names"))
        architectures = [""]
    tied = _first(config.get("tie_word_embeddings"), text.get("tie_word_embeddings"))
    if tied is not None and not isinstance(tied, bool):
        keys.problems.append(Problem(f"{keys.where}: tie_word_embeddings", tied, "true, false or null"))
    ids = [generation, config, text]
    facts = VerifierFacts(
        path=path,
        architecture=str(architectures[0]),
        model_type=model_type,
        hidden_size=hidden_size,
        intermediate_size=keys.integer("intermediate_size", default=_active_expert_width(text)),
        num_layers=keys.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=keys.integer("vocab_size"),
        max_positions=keys.integer("max_position_embeddings"),
        rms_norm_eps=keys.real("rms_norm_eps", missing="a verifier with RMSNorm; others are not supported"),
        rope_parameters=_rope(text, keys),
        tie_word_embeddings=model_type in _TIED_BY_DEFAULT if tied is None else bool(tied),
        norm_offset=1.0 if model_type in PLUS_ONE_NORM_TYPES else 0.0,
        bos_token_id=_token("bos_token_id", ids, keys),
        eos_token_ids=_end_tokens((text, config, generation), keys),
        pad_token_id=_token("pad_token_id", ids, keys),
        config_hash=_canonical_hash(config, keys.where),
        kv_lora_rank=text.get("kv_lora_rank"),
        qk_rope_head_dim=text.get("qk_rope_head_dim"),
    )
    raise_all(keys.problems)
    return facts


def read_json(directory: Path, name: str, *, required: bool = True) -> dict[str, Any]:
    """A JSON object of a model directory; `{}` where it is absent and not required."""
    wanted = "a directory with config.json and *.safetensors"
    fix = "model.path=/path/to/the/verifier"
    if not directory.is_dir():
        raise UserError(Problem("no such verifier directory", str(directory), wanted, fix))
    file = directory / name
    if not file.is_file():
        if not required:
            return {}
        snapshots = sorted(directory.glob("snapshots/*/config.json"))
        if snapshots:
            fix = f"model.path={snapshots[-1].parent}"
        raise UserError(Problem(f"the verifier's directory has no {name}", str(directory), wanted, fix))
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(Problem(f"{file} is not JSON", str(error), "a JSON object")) from error
    if not isinstance(values, dict):
        raise UserError(Problem(f"{file} holds a {type(values).__name__}", None, "a JSON object"))
    return values


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    parts = (config.get(name) for name in _TEXT_PARTS)
    text = next((part for part in parts if isinstance(part, dict)), config)
    return {**_LEFT_OUT.get(str(text.get("model_type")), {}), **text}


def _rope(text: Mapping[str, Any], keys: _Keys) -> dict[str, Any]:
    try:
        return normalised_rope(text)
    except (TypeError, ValueError) as error:
        said = {k: text[k] for k in ("rope_parameters", "rope_scaling", "rope_theta") if k in text}
        keys.problems.append(
            Problem(f"{keys.where}: its rotary embedding ({error})", said, "as transformers writes it")
        )
        return {}


def _active_expert_width(text: Mapping[str, Any]) -> int | None:
    """Feed-forward width one token meets in a model whose layers are all mixtures of experts."""
    per_token, width = text.get("num_experts_per_tok"), text.get("moe_intermediate_size")
    return per_token * width if isinstance(per_token, int) and isinstance(width, int) else None


def _first(*values: Any) -> Any:
    return next((v for v in values if v is not None), None)


def _token(name: str, parts: Iterable[Mapping[str, Any]], keys: _Keys) -> int | None:
    """The first `name` of `parts` that is not null; -1, which some checkpoints write for none, is kept."""
    given = [part[name] for part in parts if part.get(name) is not None]
    for value in given:
        if type(value) is not int:
            what = f"{keys.where} or generation_config.json: {name}"
            keys.problems.append(Problem(what, value, "one token id, or null"))
    return next((value for value in given if type(value) is int), None)


def _end_tokens(parts: Iterable[Mapping[str, Any]], keys: _Keys) -> tuple[int, ...]:
    """Every `eos_token_id` of `parts` (a number, a list, None), in order, each once; what is no token is a problem."""
    given = [part.get("eos_token_id") for part in parts]
    flat = [
        i for value in given if value is not None for i in (value if isinstance(value, list) else [value])
    ]
    vocab_size = keys.values.get("vocab_size")
    for i in flat:
        if type(i) is not int or i < 0 or (isinstance(vocab_size, int) and i >= vocab_size):
            what = f"{keys.where} or generation_config.json: eos_token_id"
            keys.problems.append(Problem(what, i, f"token ids below vocab_size {vocab_size}, or null"))
    return tuple(dict.fromkeys(i for i in flat if type(i) is int))


def _canonical_hash(config: Mapping[str, Any], where: Path) -> str:
    def stripped(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {k: stripped(v) for k, v in value.items() if k not in _VOLATILE_KEYS}
        return [stripped(v) for v in value] if isinstance(value, list) else value

    try:
        text = json.dumps(stripped(config), sort_keys=True, separators=(",", ":"))
    except RecursionError as error:
        raise UserError(Problem(f"{where} is nested too deeply", None, "a model's configuration")) from error
    return hashlib.sha256(text.encode()).hexdigest()
