"""What a plan needs to know of a verifier before its weights are touched."""

from __future__ import annotations

import dataclasses

from eagle3lab.config.schema import ModelConfig, Shapes

from .facts import read_facts
from .layer_ids import check_aux_layer_ids, default_aux_layer_ids
from .locate import locate_verifier


def shapes_of(model: ModelConfig) -> Shapes:
    """The configured shapes, else those of the checkpoint's config.json."""
    if model.shapes is not None:
        return model.shapes
    facts = read_facts(locate_verifier(model))
    fields = {f.name: getattr(facts, f.name) for f in dataclasses.fields(Shapes) if hasattr(facts, f.name)}
    return Shapes(**{**fields, "num_parameters": 0})


def layer_ids_of(ids: list[int] | None, shapes: Shapes) -> tuple[int, ...]:
    return check_aux_layer_ids(ids, shapes.num_layers) if ids else default_aux_layer_ids(shapes.num_layers)
