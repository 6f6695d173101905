from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.schema import DraftConfig
from eagle3lab.draft.export import export_draft
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.layer_ids import default_aux_layer_ids
from eagle3lab.verifier.weights import EdgeWeights, load_edge_weights

from .checkpoints import KINDS, LATENT_KEYS, UNPACKED_INT4, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The tiny checkpoint of a kind, made once; `kimi_k2.flat`, `kimi_k25.flat`: the same weights as a DeepSeek-V3."""

    @cache
    def make(name: str) -> Path:
        kind, _, flat = name.partition(".")
        made = KINDS[kind]
        if flat:
            made = replace(made, keys=LATENT_KEYS, layout=UNPACKED_INT4 if kind == "kimi_k25" else None)
        return make_checkpoint(tmp_path_factory.mktemp(kind), made)

    return make


@pytest.fixture(scope="session")
def edges(checkpoint: Callable[[str], Path]) -> Callable[[str], tuple[VerifierFacts, EdgeWeights]]:
    """What a draft is built from."""

    @cache
    def read(kind: str) -> tuple[VerifierFacts, EdgeWeights]:
        facts = read_facts(checkpoint(kind))
        return facts, load_edge_weights(facts)

    return read


@pytest.fixture(scope="session")
def make_draft(
    edges: Callable[[str], tuple[VerifierFacts, EdgeWeights]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Path]:
    """An exported draft of random weights, wide enough apart to propose many tokens; every other token is in it."""

    @cache
    def make(kind: str, aux_layer_ids: tuple[int, ...] | None = None) -> Path:
        facts, edge = edges(kind)
        vocabulary = DraftVocabulary.from_ids(range(0, facts.vocab_size, 2), facts.vocab_size)
        ids = aux_layer_ids or default_aux_layer_ids(facts.num_layers)
        cfg = DraftConfig(name="test", vocab_size=vocabulary.size)
        draft: Any = build_draft(cfg, facts, edge, vocabulary, ids, attention="sdpa", seed=0)
        for parameter in draft.parameters():
            if parameter.requires_grad and parameter.ndim > 1:
                parameter.data *= 4
        directory = tmp_path_factory.mktemp(kind) / "draft"
        export_draft(draft, directory, {})
        return directory

    return make
