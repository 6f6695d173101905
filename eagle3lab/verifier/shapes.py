"""What a plan needs to know of a verifier before its weights are touched."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.config.schema import DraftConfig, ModelConfig, Shapes, VerifierSource

from .checkpoint import tensor_index
from .facts import VerifierFacts, read_facts
from .layer_ids import OVERRIDE, check_aux_layer_ids, default_aux_layer_ids
from .locate import locate_verifier


def shapes_of(model: ModelConfig) -> Shapes:
    """The configured shapes, else those of the checkpoint: its config.json and the headers of its files.

    Raises `UserError` where the checkpoint is there and has others: every figure of a plan would be another model's.
    """
    if model.shapes is not None:
        path = Path(model.path or "").expanduser()
        if model.source is VerifierSource.local and model.path and (path / "config.json").is_file():
            _require_same(model.shapes, read_facts(path))
        return model.shapes
    facts = read_facts(locate_verifier(model))
    fields = {f.name: getattr(facts, f.name) for f in dataclasses.fields(Shapes) if hasattr(facts, f.name)}
    tensors = tensor_index(facts.path).values()
    num_parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    num_bytes = sum(tensor.end - tensor.start for tensor in tensors)
    return Shapes(
        **{**fields, "num_parameters": num_parameters, "bytes_per_parameter": num_bytes / num_parameters}
    )


def contradictions(shapes: Shapes, facts: VerifierFacts) -> dict[str, tuple[Any, Any]]:
    """Names with the configured value and the checkpoint's, where they differ."""
    both = {k: (v, getattr(facts, k)) for k, v in vars(shapes).items() if v is not None and hasattr(facts, k)}
    return {k: (said, found) for k, (said, found) in both.items() if said != found}


def _require_same(shapes: Shapes, facts: VerifierFacts) -> None:
    if wrong := contradictions(shapes, facts):
        raise UserError(
            Problem(
                f"the model's option is of another verifier than the one in {facts.path}",
                ", ".join(f"{k} {said}" for k, (said, _) in wrong.items()),
                ", ".join(f"{k} {found}" for k, (_, found) in wrong.items()) + ", as its config.json says",
                f"model.shapes=null for a variant of it, or model=local model.name=NAME model.path={facts.path}",
            )
        )


def layer_ids_of(own: list[int] | None, own_key: str, model: ModelConfig, num_layers: int) -> tuple[int, ...]:
    """The ids set as `own_key`, else the model's, else the default ones; an error names the key they came from."""
    ids, override = (own, own_key) if own else (model.aux_layer_ids, OVERRIDE)
    if not ids:
        return default_aux_layer_ids(num_layers)
    return check_aux_layer_ids(ids, num_layers, override=override)


def draft_layer_ids(draft: DraftConfig, model: ModelConfig, shapes: Shapes) -> tuple[int, ...]:
    """The draft's aux layers: its own ids, or the model's, or as many of the model's as it asks for.

    Those it asks for are spread evenly, the model's first and last included; a single one is the last, which is
    nearest to the verifier's output. Raises `UserError` when the model has fewer.
    """
    ids = layer_ids_of(draft.aux_layer_ids, "draft.aux_layer_ids", model, shapes.num_layers)
    count = draft.num_aux_layers
    if count is None or count == len(ids):
        return ids
    if count > len(ids):
        raise UserError(
            Problem(
                "draft.num_aux_layers",
                count,
                f"at most the {len(ids)} aux layers of the model, {list(ids)}",
                "draft.aux_layer_ids=[...] with ids that the store holds",
            )
        )
    if count == 1:
        return ids[-1:]
    return tuple(ids[i * (len(ids) - 1) // (count - 1)] for i in range(count))
