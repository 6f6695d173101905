"""EXP-04: the frozen embedding and head, from every form in which a checkpoint holds them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DraftConfig
from eagle3lab.draft.speculators_model import build_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier import weights
from eagle3lab.verifier.facts import read_facts

CASES = Path(__file__).parent
SHARED = CASES / "_shared"
IDS = [2, 5, 100, 258]


def frozen(directory: Path) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Embedding, head rows and the norm that a draft of this verifier gets."""
    facts = read_facts(directory)
    vocabulary = DraftVocabulary.from_ids(IDS, facts.vocab_size)
    edge = weights.load_edge_weights(facts)
    cfg = DraftConfig(name="case")
    model: Any = build_draft(cfg, facts, edge, vocabulary, (2, 4, 5), attention="sdpa", seed=0)
    assert torch.equal(model.lm_head.weight, model.verifier_lm_head.weight)
    return model.embed_tokens.weight, model.lm_head.weight, model.verifier_norm.weight


def test_exp_04_a_tied_head_is_the_embedding_matrix() -> None:
    case = json.loads((CASES / "EXP-04" / "expected.json").read_text())["tied"]
    directory = SHARED / case["shared_target"]
    held = load_file(directory / "model.safetensors")
    assert "lm_head.weight" not in held
    embedding, head, _ = frozen(directory)
    wanted = held["model.embed_tokens.weight"].float()
    assert torch.equal(embedding, wanted)
    assert torch.equal(head, wanted[IDS])


def test_exp_04_a_single_file_without_an_index_loads() -> None:
    held = load_file(SHARED / "target_tiny" / "model.safetensors")
    embedding, head, norm = frozen(SHARED / "target_tiny")
    assert torch.equal(embedding, held["model.embed_tokens.weight"].float())
    assert torch.equal(head, held["lm_head.weight"][IDS].float())
    assert torch.equal(norm, held["model.norm.weight"].float())


def test_exp_04_an_index_is_followed_and_only_what_is_needed_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "sharded"
    shutil.copytree(CASES / "EXP-04" / "sharded", directory)
    shutil.copy(SHARED / "target_tiny" / "config.json", directory)
    read: list[str] = []
    original = weights._read

    def recorded(entry: Any) -> torch.Tensor:
        read.append(entry.name)
        return original(entry)

    monkeypatch.setattr(weights, "_read", recorded)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    embedding, head, _ = frozen(directory)
    assert set(read) == {"model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"}
    for name, tensor in (("model.embed_tokens.weight", embedding), ("lm_head.weight", head)):
        held = load_file(directory / index[name])[name].float()
        assert torch.equal(tensor, held if name.startswith("model") else held[IDS])


def test_exp_04_a_checkpoint_of_bin_files_names_what_is_missing(tmp_path: Path) -> None:
    shutil.copy(SHARED / "target_tiny" / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="safetensors"):
        weights.load_edge_weights(read_facts(tmp_path))
