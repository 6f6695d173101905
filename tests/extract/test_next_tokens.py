"""The test at train start of a verifier that fits nowhere: last states, head and norm against the store's own tokens."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3lab.config.check import CHECKS
from eagle3lab.config.compose import compose_alone
from eagle3lab.config.errors import IntegrityError
from eagle3lab.config.schema import Backend, ExtractorConfig, LastState
from eagle3lab.engines.base import States
from eagle3lab.extract import second_opinion, self_test
from eagle3lab.extract.next_tokens import NextTokens, measure_next_tokens, require_next_tokens
from eagle3lab.extract.pipeline import extract_store
from eagle3lab.extract.self_test import self_test_line
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.locate import asset_path
from eagle3lab.verifier.weights import load_edge_weights

FACTS = read_facts(asset_path("tiny"))


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> dict[LastState, StoreReader]:
    """Conversations of the tiny verifier, which it was trained on; with all last states, and with those needed."""
    words = ["model=tiny", "hardware=cpu", "data.max_conversations=12"]
    cfg = compose_alone("train", words, CHECKS["train"])
    made = {}
    for kept in LastState:
        path = tmp_path_factory.mktemp("next_tokens") / kept.value
        extract = ExtractorConfig(backend=Backend.hf, last_state=kept)
        quiet = Console(file=io.StringIO())
        extract_store(
            model=cfg.model, data=cfg.data, extract=extract, hardware=cfg.hardware, store=path, console=quiet
        )
        made[kept] = StoreReader(path)
    return made


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_opinion, "free_bytes", lambda device: 1000)


def measured(reader: StoreReader, shift: int = 0, **edge: torch.Tensor) -> NextTokens:
    samples, kept = self_test._sample(reader, 4)
    shifted = [replace(s, last=s.last.roll(shift, 0)) for s in samples]
    weights = replace(load_edge_weights(FACTS, parts=("head", "norm")), **edge)
    return measure_next_tokens(shifted, kept, weights, eps=FACTS.rms_norm_eps, vocab_size=FACTS.vocab_size)


@pytest.mark.parametrize("kept", LastState)
def test_a_right_store_passes_without_the_verifiers_layers(
    stores: dict[LastState, StoreReader], kept: LastState, no_room: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(self_test, "reference_forward", None)  # a forward pass would fail
    line = self_test_line(stores[kept], FACTS, num_rows=2, device="cpu", trust_remote_code=False)
    assert line.startswith(
        "alignment self-test without a forward pass, for which there is no room, passed: 2 rows"
    )
    assert f"a blind guess {math.log(1024):.2f}" in line
    assert "Aux layers were tested when they were extracted" in line


def test_the_figures_are_those_of_a_plain_softmax(stores: dict[LastState, StoreReader]) -> None:
    reader = stores[LastState.all]
    found = measured(reader)
    edge = load_edge_weights(FACTS, parts=("head", "norm"))
    assert edge.head is not None
    assert edge.norm is not None
    nats: list[float] = []
    for states in self_test._sample(reader, 4)[0]:
        for p in range(len(states.token_ids) - 2):
            x = states.last[p].float()
            normed = x / torch.sqrt((x * x).mean() + FACTS.rms_norm_eps) * edge.norm.float()
            logits = edge.head.float() @ normed
            nats.append(float(torch.logsumexp(logits, 0) - logits[states.token_ids[p + 1]]))
    assert found.following == pytest.approx(sum(nats) / len(nats), rel=1e-4)
    assert found.tokens == len(nats)


@pytest.mark.parametrize(("shift", "suspect"), [(1, "one position behind"), (-1, "one position before")])
def test_states_beside_their_tokens_are_found(
    stores: dict[LastState, StoreReader], shift: int, suspect: str
) -> None:
    found = measured(stores[LastState.all], shift)
    with pytest.raises(IntegrityError, match=suspect) as refused:
        require_next_tokens(found, where="store X", fix="another")
    assert "a blind guess 6.93" in str(refused.value)


def test_states_of_another_verifier_are_found(stores: dict[LastState, StoreReader]) -> None:
    head = load_edge_weights(FACTS, parts=("head", "norm")).head
    assert head is not None
    shuffled = head[torch.randperm(len(head), generator=torch.Generator().manual_seed(0))]
    assert "another verifier's" in str(measured(stores[LastState.all], head=shuffled).suspect)


def test_rows_without_a_place_to_look_at_are_not_taken_for_right() -> None:
    nothing = States(torch.tensor([1, 2, 3]), torch.zeros(3, 3 * 128), torch.zeros(3, 128))
    edge = load_edge_weights(FACTS, parts=("head", "norm"))
    found = measure_next_tokens(
        [nothing], [torch.zeros(3, dtype=torch.bool)], edge, eps=1e-6, vocab_size=FACTS.vocab_size
    )
    assert found.suspect == "no position has a last state and two tokens after it"


def test_packed_weights_need_the_room_of_what_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    save_file(
        {
            "a.weight_packed": torch.zeros(16, 4, dtype=torch.int32),  # 32 4-bit values in a row
            "b.weight_blocks": torch.zeros(4, 8, dtype=torch.uint8),
            "c.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        },
        tmp_path / "model.safetensors",
    )
    values = 16 * 32 + 4 * 16 + 4 * 8
    assert second_opinion.weight_bytes(tmp_path, torch.float32) == 4 * values
    for free, fits in ((4 * values * 1.2 + 1, True), (4 * values, False)):
        monkeypatch.setattr(second_opinion, "free_bytes", lambda device, free=free: free)
        assert second_opinion.forward_fits(tmp_path, torch.float32, "cuda") is fits
