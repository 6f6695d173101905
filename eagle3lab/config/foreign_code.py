"""Code that comes with a verifier runs only where a configuration says so, and then it is said."""

from __future__ import annotations

from .schema import ModelConfig


def foreign_code(model: ModelConfig) -> str | None:
    """What to say where code that lies beside a verifier's files will be run; None where none will."""
    if not model.trust_remote_code:
        return None
    places = " and ".join(place for place in (model.path, model.tokenizer) if place)
    return f"model.trust_remote_code=true: code that lies in {places} will be run"
