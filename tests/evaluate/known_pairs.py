"""Verifiers and drafts whose acceptance is known before anything is decoded; heads as wide as vLLM's CPU build takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3lab.config.schema import DraftConfig
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.verifier.facts import VerifierFacts, read_facts
from eagle3lab.verifier.weights import EdgeWeights, load_edge_weights

from ..architectures.checkpoints import Kind, make_checkpoint

SIZE = 64  # vocabulary and hidden size of the known-answer pair: embeddings are unit vectors
AUX = (2, 3, 5)
SURE = 5.0


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


def successor(token: int) -> int:
    return 3 if token == SIZE - 1 else token + 1


def make_succ_pair(path: Path, weight: float = SURE) -> Pair:
    """The verifier that says x + 1 after x: every layer passes the embedding on, the head shifts it.

    Its logit is 8 * `weight`, that of every other token 0.
    """
    config = LlamaConfig(
        vocab_size=SIZE, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=6, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=256, bos_token_id=0, eos_token_id=1,
        pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(SIZE))
        model.lm_head.weight.zero_()
        for token in range(3, SIZE):
            model.lm_head.weight[successor(token), token] = weight
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    model.config.dtype = torch.float32
    model.save_pretrained(path)
    return open_pair(path)


def pass_on(draft: Any, head: Callable[[int], int], weight: float = SURE) -> Any:
    """A draft whose state is the aux state, with a head that says head(x) for the unit vector x.

    Of a pruned vocabulary it says what it has a word for.
    """
    words = range(SIZE) if draft.t2d is None else draft.t2d.nonzero()[:, 0].tolist()
    row_of = {int(token): row for row, token in enumerate(words)}
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.eye(SIZE) / 3] * 3, dim=1))
        draft.layers[0].self_attn.o_proj.weight.zero_()
        draft.layers[0].mlp.down_proj.weight.zero_()
        draft.lm_head.weight.zero_()
        for token in range(3, SIZE):
            if head(token) in row_of:
                draft.lm_head.weight[row_of[head(token)], token] = weight
    return draft


def make_one_right(pair: Pair, vocabulary: DraftVocabulary | None = None, weight: float = SURE) -> Any:
    """Right at position 0 and wrong at every later one: its state stays that of token i."""
    return pass_on(pair.draft(vocabulary=vocabulary), lambda token: successor(successor(token)), weight)


def make_perfect(pair: Pair) -> Any:
    """Always right: the MLP moves the state one token on in every step."""
    draft = pass_on(pair.draft(), successor)
    mlp = draft.layers[0].mlp
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(torch.eye(SIZE))
        mlp.up_proj.weight.copy_(torch.eye(SIZE))
        mlp.down_proj.weight.zero_()
        for token in range(3, SIZE):
            mlp.down_proj.weight[successor(token), token] = 5.0
    return draft


def make_random_pair(path: Path, spread: float = 0.1) -> Pair:
    """A random verifier over the byte tokenizer of the shipped cases, with a tokenizer beside it."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "max_position_embeddings": 128,
    }
    llama = Kind("LlamaConfig", "LlamaForCausalLM")
    return open_pair(make_checkpoint(path, llama, seed=1, spread=spread, sizes=sizes))
