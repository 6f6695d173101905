"""Values of the ablation axes that parse but cannot work, each with an override that would."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3lab.config.check import check_train
from eagle3lab.config.noise import NoiseConfig, NoiseKind, describe_noise
from eagle3lab.config.schema import DraftConfig, OptimConfig, TrainerConfig, TrainRoot

from .option_files import typed


@pytest.fixture(scope="module")
def tiny() -> TrainRoot:
    root = typed("train", ["model=tiny", "hardware=cpu"])
    assert isinstance(root, TrainRoot)
    return root


@pytest.mark.parametrize(
    ("parts", "says", "fix"),
    [
        (
            {"noise": NoiseConfig(relative=True)},
            "noise.relative is set but noise.kind is none",
            "relative=false",
        ),
        ({"noise": NoiseConfig(NoiseKind.eagle, 0.2, True)}, "noise.kind is eagle", "noise.relative=false"),
        ({"noise": NoiseConfig(NoiseKind.eagle)}, "noise.kind is eagle but noise.scale is 0", "noise=none"),
        ({"noise": NoiseConfig(NoiseKind.gaussian, -1.0)}, "noise.scale", "noise.scale=0.05"),
        ({"train": TrainerConfig(data_share=0.0)}, "train.data_share", "train.data_share=1"),
        ({"train": TrainerConfig(data_share=1.5)}, "train.data_share", "train.data_share=1"),
        (
            {"draft": DraftConfig(name="d", num_aux_layers=0)},
            "draft.num_aux_layers",
            "draft.num_aux_layers=1",
        ),
        (
            {"draft": DraftConfig(name="d", num_aux_layers=2, aux_layer_ids=[1, 2])},
            "draft.num_aux_layers and draft.aux_layer_ids are both set",
            "draft.num_aux_layers=null",
        ),
        ({"optim": OptimConfig(lr_warmup_share=0.9)}, "optim.lr_warmup_share", "optim.lr_warmup_share"),
        (
            {"optim": OptimConfig(lr_warmup_share=0.1, lr_warmup_updates=5)},
            "optim.lr_warmup_updates and optim.lr_warmup_share are both set",
            "optim.lr_warmup_updates=null",
        ),
        (
            {"optim": OptimConfig(lr_warmup_share=0.1, lr_warmup_updates=5, lr_warmup_tokens=9)},
            "are all set",
            "optim.lr_warmup_updates=null optim.lr_warmup_tokens=null",
        ),
    ],
)
def test_a_value_that_cannot_work_is_one_problem_with_a_fix(
    tiny: TrainRoot, parts: dict[str, object], says: str, fix: str
) -> None:
    (problem,) = check_train(replace(tiny, **parts))  # type: ignore[arg-type]
    assert says in problem.what
    assert fix in problem.fix


def test_noise_is_described_by_what_it_does() -> None:
    assert describe_noise(NoiseConfig()) == "none"
    assert describe_noise(NoiseConfig(NoiseKind.uniform, 0.05)) == "uniform in +-0.05"
    assert (
        describe_noise(NoiseConfig(NoiseKind.gaussian, 0.1, True))
        == "gaussian, sigma 0.1 of each layer's RMS"
    )
    assert describe_noise(NoiseConfig(NoiseKind.eagle, 0.2)) == "uniform in +-0.1 x 512 / length of the row"
