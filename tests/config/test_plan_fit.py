"""What a refused plan proposes can be typed, and fits: every proposal is composed and planned by the command itself."""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import lru_cache

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from eagle3lab.cli import run_extract, run_train
from eagle3lab.config.errors import UserError
from eagle3lab.config.invocation import Invocation
from eagle3lab.config.words import command_line

from .option_files import checked, composed

RUNS = {"train": run_train, "extract": run_extract}
KIMI = ["experiment=kimi_k25_blackwell8"]
QWEN = ["model=qwen3_8b", "data=sharegpt", "hardware=hopper8"]


@lru_cache
def base(entry: str, words: tuple[str, ...]) -> DictConfig:
    cfg = composed(entry, command_line(entry, words))
    with open_dict(cfg):
        del cfg.hydra  # slow to copy
    return cfg


def plan(entry: str, words: Sequence[str], more: Sequence[str] = ()) -> None:
    """Run the command with plan=true; `more`: overrides as Hydra parses them, into the typed configuration."""
    cfg = copy.deepcopy(base(entry, tuple(words)))
    for override in OverridesParser.create().parse_overrides([*more, "plan=true"]):
        OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=False)
    RUNS[entry](checked(cfg, entry, more), Invocation())


def proposals(entry: str, words: Sequence[str]) -> list[str]:
    """The overrides that the refusal of a plan proposes, as they would be typed."""
    with pytest.raises(UserError, match="does not fit") as refused:
        plan(entry, words)
    (problem,) = refused.value.problems
    return [text.partition(": ")[2] or text for text in problem.fix.split(", or ")]


@pytest.mark.parametrize(
    ("entry", "words", "expected"),
    [
        (
            "train",
            [*QWEN, "train.seq_len=8192", "draft.ttt_steps=7", "hardware.device_memory_gib=16"],
            [r"hardware\.strategy=fsdp2", r"train\.seq_len=\d+", r"draft\.ttt_steps=[1-6]"],
        ),
        (
            "train",
            [*QWEN, "train.seq_len=8192", "train.tokens_per_update=131072", "hardware.device_memory_gib=13"],
            [r"train\.seq_len=\d+ train\.tokens_per_update=\d+"],
        ),
        ("train", [*KIMI, "train.acceptance.every_updates=200"], [r"train\.acceptance\.every_updates=null"]),
        (
            "train",
            [
                *QWEN,
                "train.seq_len=16384",
                "draft.ttt_steps=7",
                "draft.step=reference",
                "hardware.device_memory_gib=40",
            ],
            [r"draft\.step=pruned$", r"train\.seq_len=\d+$"],
        ),
        (
            "train",
            [*KIMI, "hardware.device_memory_gib=26"],
            [r"hardware\.strategy=fsdp2 train\.", r"hardware\.strategy=fsdp2 draft\."],
        ),
        (
            "train",
            [*KIMI, "hardware.device_memory_gib=22"],
            [r"hardware\.strategy=fsdp2 draft\.intermediate_size="],
        ),
        (
            "extract",
            ["model=qwen3_32b", "data=sharegpt", "hardware=h200x2", "hardware.device_memory_gib=70"],
            [r"hardware\.engine\.tensor_parallel=2 hardware\.engine\.data_parallel=1"],
        ),
        ("extract", [*KIMI, "hardware.device_memory_gib=79.5"], [r"hardware\.engine\.memory_share=0\.9"]),
        ("extract", [*KIMI, "hardware.engine.cache_gib=0.1"], [r"hardware\.engine\.cache_gib=null"]),
        (
            "extract",
            [*KIMI, "extract.batch_tokens=131072", "hardware.device_memory_gib=82"],
            [r"extract\.batch_tokens=\d+"],
        ),
        (
            "extract",
            ["model=deepseek_v3", "data=sharegpt", "hardware=hopper8"],
            [r"hardware\.num_devices=16 hardware\.engine\.tensor_parallel=16"],
        ),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_what_does(
    entry: str, words: list[str], expected: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = proposals(entry, words)
    for pattern in expected:
        assert any(re.match(pattern, proposal) for proposal in found), (pattern, found)
    for proposal in found:
        plan(entry, words, proposal.split())  # is typed as it must be, validates, fits
    said = capsys.readouterr().out
    assert said.count("plan of ") == 1 + len(found)
    with capsys.disabled():
        print(f"{entry} {' '.join(words)}: {found}")


def test_a_proposed_pack_is_the_longest_that_fits_and_holds_every_row() -> None:
    words = [
        *QWEN,
        "train.seq_len=8192",
        "draft.ttt_steps=7",
        "hardware.num_devices=1",
        "hardware.device_memory_gib=14",
    ]
    pack = next(p for p in proposals("train", words) if p.startswith("train.seq_len="))
    length = int(pack.partition("=")[2])
    assert length % 128 == 0
    with pytest.raises(UserError, match="does not fit"):
        plan("train", words, [f"train.seq_len={length + 128}"])
    longer_rows = [*words, f"data.max_len={length + 1}"]
    assert not any(p.startswith("train.seq_len=") for p in proposals("train", longer_rows))


def test_where_nothing_would_do_another_device_is_asked_for() -> None:
    assert proposals("train", [*QWEN, "hardware.device_memory_gib=4"]) == [
        "hardware=NAME with more memory per device"
    ]


@pytest.mark.parametrize(
    ("model", "fix"), [("gemma3_1b", "parallel=4 hardware.engine.data_parallel=2"), ("glm45_air", "")]
)
def test_a_verifier_whose_heads_cannot_be_split_is_refused_by_its_plan(model: str, fix: str) -> None:
    words = [f"model={model}", "data=sharegpt", "hardware=blackwell8"]
    if not fix:
        plan("extract", words)
        return
    with pytest.raises(UserError, match="4 attention heads cannot be split") as refused:
        plan("extract", words)
    (problem,) = refused.value.problems
    assert problem.fix.endswith(fix)
    plan("extract", words, problem.fix.split())
