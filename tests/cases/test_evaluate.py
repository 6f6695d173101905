"""LOG-03, VOC-05, PAR-04: acceptance by its conventions, over the full vocabulary, from sums that are divided once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from eagle3lab.engines.session import SessionStep
from eagle3lab.evaluate.acceptance import AcceptanceCounts, summarise
from eagle3lab.evaluate.decoder import Prefill, decode_with_draft
from eagle3lab.evaluate.drafts import vocabulary_figures

HERE = Path(__file__).parent
EXPECTED = json.loads((HERE / "LOG-03" / "expected.json").read_text())


def test_log_03_every_figure_says_which_one_it_is():
    counts = EXPECTED["from_counts"]
    stats = summarise([AcceptanceCounts(counts["drafts"], tuple(counts["accepted_at"]))])
    assert stats.conditional_acceptance == pytest.approx(counts["conditional"])
    assert stats.conditional_acceptance == pytest.approx(EXPECTED["conditional_acceptance"])
    assert stats.unconditional_acceptance == pytest.approx(EXPECTED["unconditional"])
    assert stats.accepted_draft_tokens_per_step == pytest.approx(EXPECTED["accepted_draft_tokens_per_step"])
    assert stats.acceptance_length == pytest.approx(EXPECTED["tokens_per_step_with_bonus"])
    assert stats.draft_acceptance_rate == pytest.approx(EXPECTED["draft_acceptance_rate"])
    wrong = EXPECTED["wrong"].values()
    assert not {round(v, 6) for v in stats.to_json().values() if isinstance(v, float)} & set(wrong)


def test_log_03_per_prompt_counts_pool_to_the_same_figures():
    """The same 100 steps, as the accepted tokens of every step of three texts."""
    steps = [0] * 20 + [1] * 32 + [2] * 24 + [3] * 24
    texts = [AcceptanceCounts.from_steps(part, 3) for part in (steps[:7], steps[7:60], steps[60:])]
    stats = summarise(texts)
    counts = EXPECTED["from_counts"]
    assert (stats.drafts, list(stats.accepted_at)) == (counts["drafts"], counts["accepted_at"])
    assert stats.acceptance_length == pytest.approx(EXPECTED["tokens_per_step_with_bonus"])


class _Said:
    """A verifier whose next token is known, whatever it is fed."""

    def __init__(self, token: int) -> None:
        self.length, self.token = 1, token

    def forward(self, tokens, *, num_logits=None, states=True):
        self.length += len(tokens)
        logits = torch.nn.functional.one_hot(torch.tensor([self.token] * len(tokens)), 16).float()
        return SessionStep(logits, torch.zeros(len(tokens), 1), None)

    def crop(self, length: int) -> None:
        self.length = length


class _Drafted:
    def __init__(self, token: int) -> None:
        self.token = token

    def extend(self, aux, tokens):
        pass

    def propose(self, num_tokens):
        return [self.token] * num_tokens


def test_voc_05_a_drafted_token_is_right_only_where_it_is_the_verifiers_own():
    """Real decoding, one step per position: right over the full vocabulary, not over the draft's part of it."""
    expected = json.loads((HERE / "VOC-05" / "expected.json").read_text())
    own, drafted = expected["target_top1_full_vocab"], expected["draft_top1"]
    texts = []
    for verifier, draft in zip(own, drafted, strict=True):
        start = Prefill((0,), torch.zeros(16), torch.zeros(1, 1))
        decoded = decode_with_draft(_Said(verifier), start, lambda t=draft: _Drafted(t), 1, 2, ())
        texts.append(AcceptanceCounts.from_steps(decoded.accepted, 1))
    stats = summarise(texts)
    assert stats.unconditional_acceptance == (pytest.approx(expected["reported_accuracy_must_be"]),)
    known = torch.zeros(16, dtype=torch.bool)
    known[expected["draft_vocab"]] = True
    draft_of = type("Draft", (), {"t2d": known})
    assert vocabulary_figures(draft_of, own)["coverage"] == pytest.approx(expected["coverage_to_report"])


def test_par_04_texts_of_unequal_length_are_summed_and_divided_once():
    expected = json.loads((HERE / "PAR-04" / "expected.json").read_text())
    parts = [AcceptanceCounts(r["total"], (r["correct"],)) for r in expected["ranks"]]
    stats = summarise(parts)
    assert stats.unconditional_acceptance == (pytest.approx(expected["right"]),)
    assert stats.unconditional_acceptance[0] != pytest.approx(expected["mean_of_means"])
    assert summarise([parts[0] + parts[1]]).unconditional_acceptance == stats.unconditional_acceptance
    assert all(0 <= p <= 1 for p in (*stats.unconditional_acceptance, *stats.conditional_acceptance))
