"""Settings of selection, early stopping and acceptance in training: every mistake with its key and a way out."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import UserError
from eagle3lab.config.invocation import Invocation, named
from eagle3lab.config.schema import TrainRoot
from eagle3lab.config.selection import SelectBy


def composed(*words: str) -> TrainRoot:
    cfg = compose.compose_alone("train", ["model=tiny", "hardware=cpu", *words], CHECKS["train"])
    assert isinstance(cfg, TrainRoot)
    return cfg


def test_by_default_a_run_selects_by_simulated_acceptance_and_neither_stops_nor_decodes() -> None:
    train = composed().train
    assert train.select_by is SelectBy.simulated_acceptance
    assert (train.early_stopping.patience, train.acceptance.every_updates) == (None, None)


@pytest.mark.parametrize(
    ("words", "fix"),
    [
        (["train.early_stopping.patience=0"], "train.early_stopping.patience=1"),
        (["train.early_stopping.min_delta=-1"], "train.early_stopping.min_delta=0"),
        (["train.acceptance.every_updates=0"], "train.acceptance.every_updates=1"),
        (["train.acceptance.num_prompts=0"], "train.acceptance.num_prompts=1"),
        (["train.acceptance.k=17"], "train.acceptance.k=1"),
        (["train.acceptance.max_new_tokens=1"], "train.acceptance.max_new_tokens=2"),
        (["train.select_by=real_acceptance"], "train.acceptance.every_updates=200"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_one_that_does(words: list[str], fix: str) -> None:
    with pytest.raises(UserError) as caught:
        composed(*words)
    assert fix in caught.value.render()


def test_a_prompt_file_is_taken_from_the_directory_of_the_call(tmp_path: Path) -> None:
    for text, expected in (("p.jsonl", str(tmp_path / "p.jsonl")), ("asset:x", "asset:x"), ("null", None)):
        cfg = composed(f"train.acceptance.prompts={text}")
        assert named(cfg, Invocation(cwd=tmp_path)).train.acceptance.prompts == expected
