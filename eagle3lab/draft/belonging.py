"""Whether an exported draft belongs to a verifier, and every reason why not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.draft.format import engine_view
from eagle3lab.verifier.facts import VerifierFacts, weight_fingerprint

if TYPE_CHECKING:
    from eagle3lab.verifier.weights import EdgeWeights

CONFIG_HASH = "verifier_config_hash"
WEIGHT_FINGERPRINT = "verifier_weight_fingerprint"  # absent from drafts that were made elsewhere


def refuse_other_verifier(
    directory: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    facts: VerifierFacts,
    edge: EdgeWeights,
) -> None:
    """Raise UserError naming everything that tells the draft's verifier from the one in `facts.path`.

    Shapes and, where the draft names them, the hash of config.json and the fingerprint of the weights: a
    verifier that was trained on has the same shapes, and often the same embedding, but other states. A draft
    that names no fingerprint is held against the embedding alone.
    """
    shape = engine_view(config)
    pairs = [
        ("hidden size of the draft's verifier", shape.hidden_size, facts.hidden_size),
        ("vocabulary of the draft's verifier", shape.vocab_size, facts.vocab_size),
        ("config hash of the draft's verifier", config.get(CONFIG_HASH), facts.config_hash),
    ]
    if config.get(WEIGHT_FINGERPRINT) is not None:
        here = weight_fingerprint(facts.path)
        pairs.append(("weight fingerprint of the draft's verifier", config[WEIGHT_FINGERPRINT], here))
    reasons = [Problem(what, was, str(now)) for what, was, now in pairs if was is not None and was != now]
    if not reasons and edge.embedding is not None:
        same = torch.equal(tensors["embed_tokens.weight"].float(), edge.embedding.float().cpu())
        if not same:
            reasons.append(Problem("the draft's embedding is not this verifier's", expected="equal weights"))
    if reasons:
        was = config["speculators_config"]["verifier"]["name_or_path"]
        raise UserError(
            Problem(
                f"the draft in {directory} belongs to another verifier ({was})",
                str(facts.path),
                "the verifier it was trained for",
                f"model=ITS_OPTION, or model=local model.name=NAME model.path={was}",
            ),
            *reasons,
        )
