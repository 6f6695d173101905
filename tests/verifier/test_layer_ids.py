from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import DraftConfig, ModelConfig, Shapes
from eagle3lab.verifier.layer_ids import check_aux_layer_ids, default_aux_layer_ids
from eagle3lab.verifier.locate import asset_path
from eagle3lab.verifier.shapes import draft_layer_ids, layer_ids_of, shapes_of


@pytest.mark.parametrize(
    ("num_layers", "ids"),
    [(7, (2, 3, 4)), (30, (2, 15, 27)), (32, (2, 16, 29)), (36, (2, 18, 33)), (61, (2, 30, 58))],
)
def test_defaults(num_layers: int, ids: tuple[int, ...]) -> None:
    assert default_aux_layer_ids(num_layers) == ids
    assert check_aux_layer_ids(ids, num_layers) == ids


@pytest.mark.parametrize(("num_layers", "proposed"), [(4, "[1, 2, 3]"), (5, "[1, 2, 4]"), (6, "[1, 3, 5]")])
def test_collapsed_defaults_propose_ids_that_are_valid(num_layers: int, proposed: str) -> None:
    with pytest.raises(UserError) as error:
        default_aux_layer_ids(num_layers)
    fix = error.value.problems[0].fix
    assert fix == f"model.aux_layer_ids={proposed}"
    ids = [int(i) for i in proposed.strip("[]").split(",")]
    assert check_aux_layer_ids(ids, num_layers) == tuple(ids)


def test_a_single_layer_has_no_ids_to_propose() -> None:
    with pytest.raises(UserError, match="at least 2 layers"):
        default_aux_layer_ids(1)


@pytest.mark.parametrize(
    ("ids", "says", "proposes"),
    [
        ([5, 2, 4], "strictly increasing", "[2, 4, 5]"),
        ([2, 2, 4], "strictly increasing", "[2, 4]"),
        ([0, 2, 4], "embedding", "[2, 4, 5]"),
        ([2, 4, 8], "at most 7", "[2, 4, 5]"),
        ([], "at least one", "[2, 4, 5]"),
        ([2, True], "whole numbers", "[2, 4, 5]"),
    ],
)
def test_wrong_ids_are_refused_with_ids_to_use(ids: list[int], says: str, proposes: str) -> None:
    with pytest.raises(UserError) as error:
        check_aux_layer_ids(ids, 8)
    assert says in str(error.value)
    assert f"model.aux_layer_ids={proposes}" in str(error.value)


def test_all_mistakes_come_together_and_name_the_setting_they_came_from() -> None:
    with pytest.raises(UserError) as error:
        check_aux_layer_ids([9, 0], 8, override="draft.aux_layer_ids")
    assert len(error.value.problems) == 3
    assert "draft.aux_layer_ids=" in str(error.value)


@pytest.mark.parametrize(
    ("count", "ids"),
    [(None, (2, 9, 17, 25, 33)), (1, (33,)), (2, (2, 33)), (3, (2, 17, 33)), (4, (2, 9, 17, 33))],
)
def test_fewer_of_the_models_layers_are_spread_over_them(count: int | None, ids: tuple[int, ...]) -> None:
    model = ModelConfig(name="m", aux_layer_ids=[2, 9, 17, 25, 33])
    shapes = Shapes(8, 8, 36, 2, 1, 4, 10, 100)
    assert draft_layer_ids(DraftConfig(name="d", num_aux_layers=count), model, shapes) == ids


def test_a_mistake_is_mended_where_it_was_made() -> None:
    shapes = Shapes(8, 8, 8, 2, 1, 4, 10, 100)
    model = ModelConfig(name="m", aux_layer_ids=[2, 8])
    with pytest.raises(UserError, match=r"\n.*extract\.layer_ids=\[2, 4, 5\]"):
        layer_ids_of([3, 8], "extract.layer_ids", model, 8)
    with pytest.raises(UserError, match=r"\n.*draft\.aux_layer_ids="):
        draft_layer_ids(DraftConfig(name="d", aux_layer_ids=[3, 8]), model, shapes)
    with pytest.raises(UserError, match=r"\n.*model\.aux_layer_ids="):
        layer_ids_of(None, "extract.layer_ids", model, 8)


def test_own_ids_come_before_the_models_and_more_layers_than_there_are_is_refused() -> None:
    model, shapes = ModelConfig(name="m"), Shapes(8, 8, 36, 2, 1, 4, 10, 100)
    assert draft_layer_ids(DraftConfig(name="d"), model, shapes) == (2, 18, 33)
    assert draft_layer_ids(DraftConfig(name="d", aux_layer_ids=[4, 5]), model, shapes) == (4, 5)
    with pytest.raises(UserError, match=r"at most the 3 aux layers of the model, \[2, 18, 33\]"):
        draft_layer_ids(DraftConfig(name="d", num_aux_layers=4), model, shapes)


def test_an_option_of_another_verifier_than_the_checkpoint_is_refused(tmp_path: Path) -> None:
    tiny = asset_path("tiny")
    own = Shapes(128, 384, 4, 4, 2, 32, 1024, 918656)
    same = ModelConfig(name="m", path=str(tiny), shapes=own)
    assert shapes_of(same) is own
    other = replace(same, shapes=replace(own, num_layers=5, hidden_size=64))
    with pytest.raises(
        UserError, match=r"hidden_size 64, num_layers 5.*hidden_size 128, num_layers 4"
    ) as error:
        shapes_of(other)
    assert (
        f"try: model.shapes=null for a variant of it, or model=local model.name=NAME model.path={tiny}"
        in str(error.value)
    )
    not_here = replace(other, path=str(tmp_path))  # a plan may be asked before the weights are there
    assert shapes_of(not_here) is not_here.shapes
