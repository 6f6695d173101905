"""LOG-03: acceptance figures by their conventions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eagle3lab.evaluate.acceptance import AcceptanceCounts, summarise

EXPECTED = json.loads((Path(__file__).parent / "LOG-03" / "expected.json").read_text())


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
