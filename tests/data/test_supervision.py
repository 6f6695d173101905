"""The three supervision rules against their definition on pairs of tokens, in samples and in counts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from eagle3lab.config.schema import Supervision
from eagle3lab.data.dataset import Eagle3SampleFileDataset
from eagle3lab.data.supervision import apply_supervision

RULES = list(Supervision)


def counts_for(rule: Supervision, mask: list[int], put_in: int) -> bool:
    """Whether the guess of token `put_in` + 1 from token `put_in` is trained on."""
    given = bool(mask[put_in])
    guessed = put_in + 1 < len(mask) and bool(mask[put_in + 1])
    return {
        Supervision.input_token: given,
        Supervision.predicted_token: guessed,
        Supervision.both: given and guessed,
    }[rule]


@pytest.mark.parametrize(
    ("rule", "pairs"),
    [
        (Supervision.input_token, ["c->d", "d->e", "e->f"]),
        (Supervision.predicted_token, ["b->c", "c->d", "d->e"]),
        (Supervision.both, ["c->d", "d->e"]),
    ],
)
def test_the_guesses_trained_on_are_those_of_the_documented_example(
    rule: Supervision, pairs: list[str]
) -> None:
    tokens, mask = "abcdef", torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.uint8)
    counted = apply_supervision(mask, rule)
    assert counted.dtype == torch.bool
    assert [f"{tokens[i]}->{tokens[i + 1]}" for i in range(5) if counted[i]] == pairs


@pytest.mark.parametrize("rule", RULES)
def test_a_sample_marks_the_inputs_whose_guess_counts(
    store: Path, make: SimpleNamespace, rule: Supervision
) -> None:
    dataset = Eagle3SampleFileDataset(store, supervision=rule)
    for i, sample in enumerate(make.samples()):
        mask = sample.mask.tolist()
        # position j of a sample holds token j + 1
        expected = [counts_for(rule, mask, j + 1) for j in range(len(mask) - 1)]
        assert dataset[i]["loss_mask"].tolist() == expected
        for steps in (1, 3, 30):
            assert dataset.supervised_counts(i, steps) == tuple(sum(expected[k:]) for k in range(steps))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", ["store", "v1"])
def test_rows_that_teach_nothing_depend_on_the_rule(
    tmp_path: Path, make: SimpleNamespace, rule: Supervision, form: str
) -> None:
    samples = make.samples()
    for i, positions in ((1, [0, 1]), (4, [2]), (6, [1, 2])):
        samples[i].mask.zero_()
        samples[i].mask[positions] = 1
    getattr(make, form)(tmp_path / "data", samples)
    found = Eagle3SampleFileDataset(tmp_path / "data", supervision=rule).unsupervised_rows()
    masks = [sample.mask.tolist() for sample in samples]
    assert found == [
        i for i, m in enumerate(masks) if not any(counts_for(rule, m, j) for j in range(1, len(m)))
    ]
    assert (4 in found) is (rule is Supervision.both)


@pytest.mark.parametrize("rule", RULES)
def test_a_row_of_one_token_has_no_guess(rule: Supervision) -> None:
    assert apply_supervision(torch.tensor([1]), rule).tolist() == [rule is Supervision.input_token]
