"""Run names follow the values, not the option chosen."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3lab.config.names import MAX_LENGTH, honest_choices, noise_label, run_name, safe_name
from eagle3lab.config.noise import NoiseConfig, NoiseKind
from eagle3lab.config.schema import DataConfig, DraftConfig, ModelConfig, TrainRoot


def config(noise: NoiseConfig) -> TrainRoot:
    return TrainRoot(
        model=ModelConfig(name="tiny"),
        data=DataConfig(name="demo"),
        draft=DraftConfig(name="eagle3"),
        noise=noise,
    )


def test_a_changed_scale_changes_the_name() -> None:
    cfg = config(NoiseConfig(NoiseKind.uniform, 0.3))
    assert noise_label(cfg.noise) == "uniform0.3"
    assert run_name(cfg, ["noise=uniform0.05", "noise.scale=0.3"]) == "tiny-demo-eagle3-uniform0.3"


def test_every_override_that_changes_the_result_is_in_the_name() -> None:
    name = run_name(
        config(NoiseConfig()), ["train.seed=3", "optim.lr=1e-3", "hardware=blackwell8", "plan=true"]
    )
    assert name == "tiny-demo-eagle3-none-lr_1e-3-seed_3"


def test_a_choice_whose_values_were_changed_does_not_pass_for_the_option() -> None:
    overrides = ["noise=uniform0.05", "noise.scale=0.3", "draft=eagle3", "draft.ttt_steps=7", "loss=kl"]
    chosen = {"noise": "uniform0.05", "draft": "eagle3", "loss": "kl"}
    shown = honest_choices(chosen, overrides, config(NoiseConfig(NoiseKind.uniform, 0.3)))
    assert shown == {"noise": "uniform0.3", "draft": "eagle3+changed", "loss": "kl"}


def test_the_options_that_a_recipe_builds_on_carry_its_name() -> None:
    chosen = {
        "draft": "eagle3",
        "optim": "adamw",
        "model": "tiny",
        "noise": "none",
        "experiment": "specforge",
    }
    shown = honest_choices(chosen, ["experiment=specforge"], config(NoiseConfig()))
    assert shown == {**chosen, "draft": "eagle3+specforge", "optim": "adamw+specforge"}


@given(st.text(min_size=1, max_size=300))
def test_a_name_is_always_one_safe_path_component(text: str) -> None:
    name = safe_name(text)
    assert re.fullmatch(rf"[\w.+-]{{1,{MAX_LENGTH}}}", name)
    assert name not in (".", "..")


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_distinct_texts_get_distinct_names(a: str, b: str) -> None:
    assert a == b or safe_name(a) != safe_name(b)


@pytest.mark.parametrize(
    ("noise", "label"),
    [
        (NoiseConfig(), "none"),
        (NoiseConfig(NoiseKind.gaussian, 0.1), "gaussian0.1"),
        (NoiseConfig(NoiseKind.uniform, 0.3, relative=True), "uniform0.3rms"),
        (NoiseConfig(NoiseKind.eagle, 0.2), "eagle0.2"),
    ],
)
def test_a_name_tells_every_kind_of_noise_apart(noise: NoiseConfig, label: str) -> None:
    assert noise_label(noise) == label
    assert run_name(config(noise), ["noise=uniform0.05", "noise.scale=9"]) == f"tiny-demo-eagle3-{label}"
