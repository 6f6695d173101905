"""An option beside an experiment does what it says, or is refused with the values that do."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from eagle3lab.config.options import options_of
from eagle3lab.config.overruled import overruled

from .option_files import CONF, composed, typed


def problems(*words: str) -> list[str]:
    return [str(p) for p in overruled(composed("train", words), words, CONF)]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["experiment=ours", "loss=ce"],
            "loss=ce is overruled by experiment=ours, which has: 'loss.kind=kl'",
        ),
        (["experiment=specforge", "draft=eagle3_fullvocab"], "draft.vocab_size=null"),
    ],
)
def test_an_option_that_would_do_nothing_is_refused_and_its_remedy_works(words: list[str], says: str) -> None:
    (message,) = problems(*words)
    assert says in message
    remedy = message.partition("try: ")[2].split()
    cfg = composed("train", [*words, *remedy])
    assert overruled(cfg, [*words, *remedy], CONF) == []
    for word in remedy:
        key, _, value = word.partition("=")
        found = OmegaConf.select(cfg, key)
        assert str(getattr(found, "value", found)).lower().replace("none", "null") == value


@pytest.mark.parametrize(
    "words",
    [
        ["experiment=ours", "loss=kl", "noise=uniform0.05"],
        [
            "experiment=kimi_k25_blackwell8",
            "noise=none",
        ],  # it chooses the option, and so does the command line
        ["experiment=demo", "optim=muon"],  # refined: another rate, the same optimizer
        ["experiment=ours", "hardware=h200", "model=qwen3_8b"],
    ],
)
def test_options_that_an_experiment_refines_or_leaves_alone_stay(words: list[str]) -> None:
    assert problems(*words) == []


def test_the_noise_that_is_chosen_beside_the_founding_experiment_is_the_noise() -> None:
    for option, scale in (("none", 0.0), ("gaussian0.1", 0.1)):
        root = typed("train", ["experiment=kimi_k25_blackwell8", f"noise={option}"])
        assert (root.noise.kind.value in option, root.noise.scale) == (True, scale)


def test_no_experiment_hides_what_is_chosen_without_being_told(tmp_path: Path) -> None:
    """A group file of another directory is not looked for, and a missing one is Hydra's to refuse."""
    assert (
        overruled(composed("train", ["experiment=ours"]), ["experiment=ours", "loss=elsewhere"], tmp_path)
        == []
    )
    assert options_of("experiment", "extract") == ["kimi_k25_blackwell8"]
