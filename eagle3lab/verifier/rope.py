"""Rotary embedding parameters in one form, whatever transformers version wrote the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Configurations written before the key existed relied on this class default (Llama, Mistral, Gemma).
DEFAULT_THETA = 10000.0

_RENAMED_TYPES = {
    "su": "longrope",  # the first Phi-3 releases
    "mrope": "default",  # text positions of a multimodal model are plain rotary positions
}
_MULTIMODAL_KEYS = ("mrope_section", "mrope_interleaved")


def normalised_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dict with at least `rope_type` and `rope_theta`, in the form of transformers 5.

    `text` is the text part of config.json. Old files hold `rope_theta` beside `rope_scaling`
    (with `type` or `rope_type`), new ones `rope_parameters`, which per layer type is nested: the
    full-attention entry is the one taken, because a draft layer attends to everything.
    """
    parameters = text.get("rope_parameters")
    if isinstance(parameters, Mapping) and any(isinstance(v, Mapping) for v in parameters.values()):
        nested = {k: v for k, v in parameters.items() if isinstance(v, Mapping)}
        parameters = nested.get("full_attention", next(iter(nested.values())))
    rope = dict(parameters or text.get("rope_scaling") or {})

    kind = rope.pop("type", None)
    kind = rope.get("rope_type") or kind or "default"
    rope["rope_type"] = _RENAMED_TYPES.get(kind, kind)
    for key in _MULTIMODAL_KEYS:
        rope.pop(key, None)

    theta = rope.get("rope_theta") or text.get("rope_theta") or DEFAULT_THETA
    rope["rope_theta"] = float(theta)
    for key in ("partial_rotary_factor", "original_max_position_embeddings"):
        if text.get(key) is not None:
            rope.setdefault(key, text[key])
    return rope
