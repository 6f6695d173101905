from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lab.config.errors import UserError
from eagle3lab.draft.vocabulary import DraftVocabulary, mapping_fault


def counts_of(pairs: dict[int, int], vocab_size: int) -> torch.Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in pairs.items():
        counts[token] = count
    return counts


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=12, max_size=40).filter(any), st.data())
def test_selection_equals_speculators(counts: list[int], data: st.DataObject) -> None:
    from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

    size = data.draw(st.integers(1, len(counts) - 1))
    seen = {i: c for i, c in enumerate(counts) if c}
    d2t, t2d = build_vocab_mappings_from_distribution(seen, size, len(counts))
    ours = DraftVocabulary.from_counts(torch.tensor(counts), size)
    assert torch.equal(ours.d2t, d2t)
    assert torch.equal(ours.t2d, t2d)
    assert ours.num_filled == max(0, size - len(seen))


def test_maps_lead_there_and_back() -> None:
    vocabulary = DraftVocabulary.from_ids([9, 2, 5], 12)
    ids = torch.arange(3)
    assert vocabulary.to_verifier(ids).tolist() == [2, 5, 9]
    assert torch.equal(vocabulary.to_draft(vocabulary.to_verifier(ids)), ids)
    assert vocabulary.to_draft(torch.tensor([0, 2, 11])).tolist() == [-1, 0, -1]
    assert vocabulary.verifier_ids.tolist() == [2, 5, 9]


@pytest.mark.parametrize("size", [None, 12])
def test_without_a_size_or_with_the_verifiers_the_vocabulary_is_full(size: int | None) -> None:
    vocabulary = DraftVocabulary.from_counts(counts_of({3: 1}, 12), size)
    assert vocabulary.is_full
    assert vocabulary.d2t.tolist() == [0] * 12


def test_coverage_is_the_share_of_counted_tokens() -> None:
    vocabulary = DraftVocabulary.from_ids([1, 3], 6)
    assert vocabulary.coverage(counts_of({1: 3, 3: 3, 5: 2}, 6)) == 0.75
    assert vocabulary.coverage_of(torch.tensor([1, 1, 5, 0])) == 0.5
    assert math.isnan(vocabulary.coverage(torch.zeros(6, dtype=torch.int64)))


@pytest.mark.parametrize("size", [0, 13, -1])
def test_an_impossible_size_is_the_users_mistake(size: int) -> None:
    with pytest.raises(UserError, match=r"draft.vocab_size.*1 to 12"):
        DraftVocabulary.from_counts(counts_of({3: 1}, 12), size)


def test_no_counted_token_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="no supervised token"):
        DraftVocabulary.from_counts(torch.zeros(12, dtype=torch.int64), 4)


@pytest.mark.parametrize(
    ("t2d", "d2t", "phrase"),
    [
        ([0, 1, 1, 0], [1, 2], "outside|not mark"),
        ([0, 1, 1, 0], [1, 3], "outside"),
        ([0, 1, 0, 0], [1, 1], "1 true entries, d2t has 2"),
        ([0, 1, 1, 0], [2, 0], "increasing"),
        ([0, 1, 0, 1], [1, 1], "not mark"),
    ],
)
def test_maps_that_do_not_fit_are_refused(t2d: list[int], d2t: list[int], phrase: str) -> None:
    with pytest.raises(ValueError, match=phrase):
        DraftVocabulary(torch.tensor(t2d, dtype=torch.bool), torch.tensor(d2t))
    assert mapping_fault(torch.tensor(t2d, dtype=torch.bool), torch.tensor(d2t)) is not None


def test_offsets_and_ids_of_another_type_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        DraftVocabulary(torch.ones(3, dtype=torch.bool), torch.zeros(3))
    with pytest.raises(ValueError, match="bool"):
        DraftVocabulary(torch.ones(3), torch.zeros(3, dtype=torch.int64))
