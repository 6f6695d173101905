"""What is said of a loss, and what is refused."""

from __future__ import annotations

import pytest

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.check_loss import check_loss
from eagle3lab.config.loss_text import describe_loss, loss_label
from eagle3lab.config.names import honest_choices, run_name
from eagle3lab.config.schema import (
    DataConfig,
    DraftConfig,
    LossConfig,
    LossKind,
    ModelConfig,
    Normalisation,
    Supervision,
    TrainRoot,
)

SUM = LossConfig(LossKind.sum, {"tv": 0.1, "kl": 1.0})


def config(loss: LossConfig) -> TrainRoot:
    return TrainRoot(
        ModelConfig(name="tiny"), DataConfig(name="demo"), draft=DraftConfig(name="eagle3"), loss=loss
    )


@pytest.mark.parametrize(
    ("loss", "label"),
    [
        (LossConfig(), "kl"),
        (LossConfig(LossKind.lk, lk_eta=1.5, step_decay=0.8), "lk-eta1.5-decay0.8"),
        (SUM, "kl+0.1tv"),
        (
            LossConfig(normalisation=Normalisation.sequence, supervision=Supervision.both),
            "kl-sequence-both",
        ),
        (LossConfig(LossKind.tv, normalisation=Normalisation.pack), "tv-pack"),
    ],
)
def test_a_label_is_made_from_the_values(loss: LossConfig, label: str) -> None:
    assert loss_label(loss) == label
    assert list(check_loss(loss)) == []


def test_names_and_tags_say_the_loss_that_runs() -> None:
    overrides = ["loss=kl", "loss.kind=tv", "loss.step_decay=0.8"]
    cfg = config(LossConfig(LossKind.tv, step_decay=0.8))
    assert run_name(cfg, overrides) == "tiny-demo-eagle3-none-tv-decay0.8"
    assert run_name(config(LossConfig()), ["train.seed=1"]) == "tiny-demo-eagle3-none-seed_1"
    assert honest_choices({"loss": "kl"}, overrides, cfg) == {"loss": "tv-decay0.8"}
    assert honest_choices({"draft": "eagle3"}, overrides, cfg) == {"draft": "eagle3"}


def test_two_sums_of_other_weights_have_other_names() -> None:
    other = LossConfig(LossKind.sum, {"tv": 0.2, "kl": 1.0})
    assert run_name(config(SUM), ["loss=sum"]) != run_name(config(other), ["loss=sum"])


def test_the_description_names_terms_decay_mean_and_rule() -> None:
    loss = LossConfig(
        LossKind.sum, {"lk": 0.5, "ce": 1.0}, 2.0, 0.8, Normalisation.pack, Supervision.predicted_token
    )
    assert describe_loss(loss) == (
        "cross entropy with the verifier's argmax + 0.5 x hybrid LK (eta 2), step k weighs 0.8**k, "
        "mean over the update's packs of their means, supervised by predicted token"
    )


@pytest.mark.parametrize(
    ("loss", "says", "proposes"),
    [
        (LossConfig(LossKind.sum), "loss.weights is empty", "loss.weights.kl=1.0"),
        (LossConfig(weights={"tv": 0.5}), "loss.weights is set but", "loss=sum loss.weights.tv=0.5"),
        (LossConfig(LossKind.sum, {"kll": 0.5}), "no loss kll", "loss.weights.kl=0.5"),
        (LossConfig(LossKind.sum, {"sum": 0.5}), "no loss sum", "loss.weights"),
        (LossConfig(LossKind.sum, {"kl": 0.0}), "loss.weights.kl: 0.0", "loss.weights.kl=1.0"),
        (LossConfig(LossKind.sum, {"kl": float("inf")}), "loss.weights.kl: inf", "loss.weights.kl=1.0"),
        (LossConfig(LossKind.lk, lk_eta=-1.0), "loss.lk_eta: -1.0", "loss.lk_eta=3"),
        (LossConfig(lk_eta=2.0), "no lk in loss.kind=kl", "loss=lk loss.lk_eta=2"),
        (LossConfig(step_decay=0.0), "loss.step_decay: 0.0", "loss.step_decay=1"),
    ],
)
def test_a_loss_that_cannot_be_meant_is_one_problem(loss: LossConfig, says: str, proposes: str) -> None:
    (problem,) = check_loss(loss)
    assert says in str(problem)
    assert proposes in str(problem)


def test_weights_are_given_on_the_command_line() -> None:
    words = ["loss=sum", "loss.weights.kl=1", "loss.weights.lk=0.5", "loss.lk_eta=2", "loss.supervision=both"]
    loss = compose.compose_alone("train", words, CHECKS["train"]).loss
    assert loss.terms() == [(LossKind.kl, 1.0), (LossKind.lk, 0.5)]
    assert loss.supervision is Supervision.both
