"""The best validation and the end of a run, from the figures alone."""

from __future__ import annotations

import json
from typing import Any

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.selection import EarlyStoppingConfig, SelectBy
from eagle3lab.training.selection import FIGURES, Selection, describe_outcome

NAN = float("nan")


def selection(select_by: SelectBy = SelectBy.simulated_acceptance, **stopping: Any) -> Selection:
    return Selection(select_by, EarlyStoppingConfig(**stopping))


def feed(chosen: Selection, values: list[float | None], start: int = 1) -> list[bool]:
    """One validation after the other; None: the figure was not measured."""
    return [
        chosen.take({"update": update} | ({} if value is None else {chosen.figure: value}))
        for update, value in enumerate(values, start)
    ]


@pytest.mark.parametrize(
    ("select_by", "values", "best"),
    [
        (SelectBy.simulated_acceptance, [1.2, 1.5, 1.4], 2),
        (SelectBy.real_acceptance, [None, 1.5, None, 1.6], 4),
        (SelectBy.loss, [3.0, 2.0, 2.5], 2),
        (SelectBy.loss, [2.0, 2.0, 2.0], 1),  # of equal ones the earlier
        (SelectBy.simulated_acceptance, [1.5, 1.5], 1),
        (SelectBy.simulated_acceptance, [NAN, 1.0, NAN], 2),
        (SelectBy.loss, [NAN, 9.0, float("-inf")], 2),
    ],
)
def test_the_best_is_the_first_of_the_best_figures(
    select_by: SelectBy, values: list[float | None], best: int
) -> None:
    chosen = selection(select_by)
    feed(chosen, values)
    assert chosen.best["update"] == best
    assert chosen.outcome()["update"] == best
    assert chosen.outcome()["value"] == chosen.best[FIGURES[select_by]] == values[best - 1]


def test_nothing_is_chosen_where_no_figure_is_a_number() -> None:
    chosen = selection(SelectBy.loss)
    assert feed(chosen, [NAN, None]) == [False, False]
    assert (chosen.best, chosen.outcome()["value"]) == ({}, None)
    assert "last weights" in describe_outcome(chosen.outcome())


@pytest.mark.parametrize(
    ("values", "min_delta", "stops_at"),
    [
        ([1.0, 1.1, 1.1, 1.0], 0.0, 4),
        ([1.0, 1.1, 1.1, 1.2, 1.2, 1.2], 0.0, 6),
        ([1.0, 1.004, 1.008], 0.01, 3),  # small steps
        ([1.0, 1.006, 1.012, 1.018, 1.024], 0.01, None),  # that add up
        ([1.0, NAN, None, 1.0, 1.0], 0.0, 5),  # what was not measured is no validation of this figure
    ],
)
def test_a_run_stops_after_as_many_validations_without_enough_gain(
    values: list[float | None], min_delta: float, stops_at: int | None
) -> None:
    chosen, stopped = selection(patience=2, min_delta=min_delta), None
    for update, value in enumerate(values, 1):
        feed(chosen, [value], update)
        if chosen.has_stopped and stopped is None:
            stopped = update
    assert stopped == stops_at


def test_without_patience_a_run_never_stops() -> None:
    chosen = selection()
    feed(chosen, [1.0] * 50)
    assert not chosen.has_stopped


def test_a_gain_too_small_to_go_on_for_is_still_the_best() -> None:
    chosen = selection(patience=3, min_delta=0.1)
    assert feed(chosen, [1.0, 1.05]) == [True, True]
    assert chosen.outcome()["validations_without_gain"] == 1


@pytest.mark.parametrize(
    ("untrained", "value", "better"), [(1.0, 1.1, True), (1.1, 1.1, False), (None, 1.1, None)]
)
def test_the_untrained_draft_is_compared_with_and_never_chosen(
    untrained: float | None, value: float, better: bool | None
) -> None:
    chosen = selection()
    if untrained is not None:
        chosen.begin({"update": 0, chosen.figure: untrained})
    feed(chosen, [value])
    outcome = chosen.outcome()
    assert (outcome["update"], outcome["better_than_untrained"]) == (1, better)
    assert ("NOTE" in describe_outcome(outcome)) == (better is False)


@pytest.mark.parametrize("stopped_after", range(7))
def test_stopped_and_resumed_is_never_stopped(stopped_after: int) -> None:
    values = [1.0, NAN, 1.2, 1.2, 1.1999, 1.3, 1.29]
    whole, first, second = (selection(patience=3, min_delta=0.05) for _ in range(3))
    whole.begin({whole.figure: 1.01})
    first.begin({whole.figure: 1.01})
    expected = feed(whole, values)
    got = feed(first, values[:stopped_after])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    got += feed(second, values[stopped_after:], stopped_after + 1)
    assert got == expected
    assert second.state_dict() == whole.state_dict()
    assert second.outcome() == whole.outcome()


def test_another_figure_on_resume_is_refused_with_the_override() -> None:
    state = selection(SelectBy.loss).state_dict()
    with pytest.raises(UserError, match=r"train\.select_by=loss"):
        selection().load_state_dict(state)
