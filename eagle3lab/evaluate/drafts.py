"""The drafts that are decoded with: as trained, as before training, and what is said of them."""

from __future__ import annotations

import copy
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eagle3lab.config.schema import ModelConfig
from eagle3lab.draft.export import export_draft
from eagle3lab.draft.format import PROVENANCE_FILE


def other_template_args(draft: Path, model: ModelConfig) -> str | None:
    """What to say when the prompts are rendered otherwise than the rows that the draft was trained on."""
    file = draft / PROVENANCE_FILE
    provenance = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    trained = provenance.get("store", {}).get("template_args")
    if trained is None or trained == dict(model.template_args):
        return None
    return (
        f"NOTE: the draft was trained on rows with model.template_args={trained}, these prompts are rendered "
        f"with {dict(model.template_args)}: its acceptance here is not that of its training"
    )


def untrained_copy(trained: Any, seed: int) -> Any:
    """The same draft before training: matrices drawn as `build_draft` draws them, norms one.

    Its head has the verifier's rows, also where a trained one began with random weights.
    """
    fresh = copy.deepcopy(trained)
    std = fresh.config.transformer_layer_config.initializer_range
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in fresh.parameters():
            if not parameter.requires_grad:
                continue
            if parameter.ndim > 1:
                drawn = torch.empty(parameter.shape).normal_(0.0, std, generator=generator)
                parameter.copy_(drawn)
            else:
                parameter.fill_(1.0)
        fresh.lm_head.weight.copy_(fresh.verifier_lm_head.weight)
    return fresh


@contextmanager
def exported(draft: Path, drafts: Mapping[str, nn.Module]) -> Iterator[dict[str, Path]]:
    """A directory for every draft: the given one as it is, any other exported for as long as it is needed."""
    with tempfile.TemporaryDirectory(prefix="eagle3lab-drafts-") as scratch:
        directories = {}
        for name, module in drafts.items():
            directories[name] = draft if name == "trained" else Path(scratch) / name
            if name != "trained":
                export_draft(module, directories[name], {"variant": name})
        yield directories


def vocabulary_figures(draft: Any, own_tokens: Sequence[int]) -> dict[str, Any]:
    """How many tokens the draft can say, and what share of the verifier's own tokens is among them."""
    if draft.t2d is None:
        return {"size": int(draft.config.draft_vocab_size), "coverage": 1.0}
    covered = draft.t2d.cpu()[torch.tensor(own_tokens, dtype=torch.int64)]
    return {"size": int(draft.t2d.sum()), "coverage": float(covered.double().mean())}
