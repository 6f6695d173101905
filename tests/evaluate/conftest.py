from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3lab.config.schema import DraftConfig
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.weights import EdgeWeights, load_edge_weights

SIZE = 64  # vocabulary and hidden size of the known-answer pair: embeddings are unit vectors
AUX = (2, 3, 5)


@dataclass
class Pair:
    """A verifier and what is needed to build drafts for it."""

    path: Path
    facts: VerifierFacts
    edge: EdgeWeights
    engine: HuggingFaceEngine

    def draft(self, seed: int = 0, vocabulary: DraftVocabulary | None = None, **options: Any) -> Any:
        vocabulary = vocabulary or DraftVocabulary.full(self.facts.vocab_size)
        cfg = DraftConfig(name="test", vocab_size=vocabulary.size, **options)
        return build_draft(cfg, self.facts, self.edge, vocabulary, AUX, attention="sdpa", seed=seed)


def open_pair(path: Path) -> Pair:
    facts = read_facts(path)
    return Pair(path, facts, load_edge_weights(facts), HuggingFaceEngine(path, facts))


@pytest.fixture(scope="session")
def successor() -> Callable[[int], int]:
    return lambda token: 3 if token == SIZE - 1 else token + 1


@pytest.fixture(scope="session")
def succ_pair(tmp_path_factory: pytest.TempPathFactory, successor: Callable[[int], int]) -> Pair:
    """The verifier that says x + 1 after x: every layer passes the embedding on, the head shifts it."""
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
        pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.zero_()
        for token in range(3, SIZE):
            model.lm_head.weight[successor(token), token] = 5.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    path = tmp_path_factory.mktemp("succ")
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    return open_pair(path)


def _pass_on(draft: Any, head: Callable[[int], int]) -> Any:
    """A draft whose state is the aux state, with a head that says head(x) for the unit vector x."""
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.eye(SIZE) / 3] * 3, dim=1))
        draft.layers[0].self_attn.o_proj.weight.zero_()
        draft.layers[0].mlp.down_proj.weight.zero_()
        draft.lm_head.weight.zero_()
        for token in range(3, SIZE):
            draft.lm_head.weight[head(token), token] = 5.0
    return draft


@pytest.fixture(scope="session")
def one_right_draft(succ_pair: Pair, successor: Callable[[int], int]) -> Any:
    """Right at position 0 and wrong at every later one: its state stays that of token i."""
    return _pass_on(succ_pair.draft(), lambda token: successor(successor(token)))


@pytest.fixture(scope="session")
def perfect_draft(succ_pair: Pair, successor: Callable[[int], int]) -> Any:
    """Always right: the MLP moves the state one token on in every step."""
    draft = _pass_on(succ_pair.draft(), successor)
    mlp = draft.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(torch.eye(SIZE))
        mlp.up_proj.weight.copy_(torch.eye(SIZE))
        mlp.down_proj.weight.zero_()
        for token in range(3, SIZE):
            mlp.down_proj.weight[successor(token), token] = 5.0
    return draft


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A random verifier over the byte tokenizer of the shipped cases, with a tokenizer beside it."""
    shared = Path(__file__).parent.parent / "cases" / "_shared"
    config = LlamaConfig(
        vocab_size=264, hidden_size=64, intermediate_size=128, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, bos_token_id=256, eos_token_id=258,
        pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(1)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_(1 + 0.2 * noise if "norm" in name else 0.1 * noise)
    path = tmp_path_factory.mktemp("random")
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((shared / "tok_bytes" / name).read_bytes())
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings["chat_template"] = (shared / "templates" / "plain.jinja").read_text()
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return open_pair(path)
