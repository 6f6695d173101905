from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from eagle3lab.config.schema import DraftConfig, LossConfig
from eagle3lab.draft.losses import token_loss
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.ttt import LossRecorder
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights

HIDDEN, VOCAB = 64, 128


@pytest.fixture(scope="session")
def facts() -> VerifierFacts:
    return VerifierFacts(
        path=Path("verifier"),
        architecture="LlamaForCausalLM",
        model_type="llama",
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_layers=8,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        max_positions=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        norm_offset=0.0,
        bos_token_id=0,
        eos_token_ids=(1,),
        pad_token_id=None,
        config_hash="0" * 64,
    )


@pytest.fixture(scope="session")
def edge() -> EdgeWeights:
    g = torch.Generator().manual_seed(5)
    return EdgeWeights(
        embedding=torch.randn(VOCAB, HIDDEN, generator=g),
        head=torch.randn(VOCAB, HIDDEN, generator=g) * 0.2,
        norm=torch.rand(HIDDEN, generator=g) + 0.5,
    )


@pytest.fixture(scope="session")
def vocabulary() -> DraftVocabulary:
    return DraftVocabulary.from_ids(range(0, VOCAB, 4), VOCAB)


@pytest.fixture(scope="session")
def make_draft(facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary) -> Callable[..., Any]:
    """A draft with weights large enough that every part of it shows in the logits."""

    def make(
        *,
        attention: str = "sdpa",
        seed: int = 0,
        vocabulary: DraftVocabulary = vocabulary,
        aux_layer_ids: tuple[int, ...] = (2, 4, 5),
        scale: float = 6.0,
        **fields: Any,
    ) -> Any:
        cfg = DraftConfig(name="test", **fields)
        model = build_draft(cfg, facts, edge, vocabulary, aux_layer_ids, attention=attention, seed=seed)
        g = torch.Generator().manual_seed(seed + 1)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    if parameter.ndim > 1:
                        parameter.mul_(scale)
                    else:
                        parameter.add_(torch.randn(parameter.shape, generator=g) * 0.1)
        return model

    return make


@pytest.fixture(scope="session")
def make_batch() -> Callable[..., dict[str, Tensor]]:
    """A pack of documents of the given lengths, padded to `seq_len`; `supervised` is a share or "all"."""

    def make(
        lengths: tuple[int, ...],
        *,
        seq_len: int | None = None,
        supervised: float | str = "all",
        num_aux: int = 3,
        seed: int = 0,
    ) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(seed)
        used = sum(lengths)
        size = seq_len or used
        documents = [i for i, n in enumerate(lengths) for _ in range(n)] + [-1] * (size - used)
        positions = [p for n in lengths for p in range(1, n + 1)] + [0] * (size - used)
        mask = (
            torch.ones(size) if supervised == "all" else (torch.rand(size, generator=g) < supervised).long()
        )
        mask[used:] = 0
        return {
            "hidden_states": torch.randn(1, size, num_aux * HIDDEN, generator=g),
            "input_ids": torch.randint(VOCAB, (1, size), generator=g),
            "document_ids": torch.tensor([documents]),
            "position_ids": torch.tensor([positions]),
            "loss_mask": mask.long()[None],
            "verifier_last_hidden_states": torch.randn(1, size, HIDDEN, generator=g) * 3,
            "lengths": torch.tensor(lengths),
        }

    return make


@pytest.fixture(scope="session")
def recorder() -> LossRecorder:
    return LossRecorder(token_loss(LossConfig()))
