"""Every mistake on the command line becomes one clear message; all of them are reported together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.errors import UserError
from eagle3lab.config.help import help_text
from eagle3lab.config.words import command_line


def problems_of(entry: str, *overrides: str) -> list[str]:
    """The messages that a command line gets, without running anything."""
    compose.register()
    overrides = tuple(command_line(entry, overrides))
    try:
        with initialize_config_dir(str(compose.config_directory()), version_base="1.3"):
            cfg = hydra_compose(entry, overrides=list(overrides))
    except Exception as error:
        if not compose.is_composition_error(error):
            raise
        return [str(p) for p in compose.explain(error, entry, overrides, CHECKS[entry]).problems]
    typed, problems = compose.to_typed(cfg, compose.ROOTS[entry])
    return [str(p) for p in [*problems, *(CHECKS[entry](typed) if typed is not None else [])]]


def test_the_users_own_command_has_no_problem() -> None:
    assert problems_of("train", "hardware=blackwell8", "noise=uniform0.05") == []


@pytest.mark.parametrize(
    ("override", "says", "proposes"),
    [
        ("noise=unifrom0.05", "group noise has no option: 'unifrom0.05'", "noise=uniform0.05"),
        ("noise=0.05", "group noise has no option: '0.05'", "noise=uniform0.05"),
        ("draft=typo", "one of eagle3, eagle31", ""),
        ("train.lerning_rate=1", "unknown key train.lerning_rate", "optim.lr"),
        ("+train.lerning_rate=1", "unknown key train.lerning_rate", "optim.lr"),
        ("+draft.ttt_stepz=5", "unknown key draft.ttt_stepz", "draft.ttt_steps"),
        ("+foo=1", "unknown key foo", ""),
        ("nois=none", "unknown key nois", "noise=..."),
        ("optim.lr=abc", "optim.lr has the wrong type: 'abc'; expected a number", ""),
        ("train.seq_len=1.5", "train.seq_len has the wrong type: '1.5'; expected a whole number", ""),
        ('optim.lr="1e-4x"', "optim.lr has the wrong type", ""),
        ("draft.norm_before_residual=maybe", "expected true or false", ""),
        ("optim.lr=nan", "optim.lr: nan", "optim.lr"),
        ("optim.lr=7", "optim.lr: 7.0; expected a number in (0, 1]", "optim.lr=0.0001"),
        ("optim.eps=-1", "optim.eps: -1.0; expected a number in [0, 1]", "optim.eps=1e-08"),
        (
            "optim.grad_clip_norm=0",
            "optim.grad_clip_norm: 0.0; expected a finite number above 0, or null",
            "optim.grad_clip_norm=null",
        ),
        ("optim.grad_clip_norm=inf", "optim.grad_clip_norm: inf", "optim.grad_clip_norm=null"),
        ("draft.ttt_steps=0", "draft.ttt_steps: 0", "draft.ttt_steps=1"),
        (
            "data.sampling.temperature=0.3",
            "data.sampling is set but data.regenerate is false: {'temperature': 0.3}",
            "data.regenerate=true",
        ),
        (
            "noise.scale=0.3",
            "noise.scale is set but noise.kind is none",
            "noise.kind=uniform noise.scale=0.3",
        ),
        ("noise.scale=-1", "noise.scale: -1.0", "noise.scale"),
        ("draft.aux_layer_ids=[2,1]", "draft.aux_layer_ids: [2, 1]", "null"),
        ("draft.aux_layer_ids=[2,15,30]", "distinct increasing ids from 1 to 29", "null"),
        ("optim.betas=0.9", "optim.betas has the wrong type: '0.9'; expected a list", "optim.betas=[0.9]"),
        ("data.paths=x.jsonl", "data.paths has the wrong type", "data.paths=[x.jsonl]"),
        ("data.paths=[null]", "data.paths[0] has the wrong type: '[null]'; expected a text", ""),
        ("run_name=[a]", "run_name has the wrong type: '[a]'; expected a text", ""),
        ("train=3", "train has the wrong type: '3'; expected keys of its own: train.NAME=VALUE", ""),
        ("train=[1]", "train has the wrong type: '[1]'; expected keys of its own", ""),
        ("train.early_stopping=5", "expected keys of its own: train.early_stopping.NAME=VALUE", ""),
        ("model.name=''", "model.name: ''; expected a name", "model.name=my_model"),
        ("data.name=../../x", "data.name: '../../x'; expected a name", "data.name=my_data"),
        ("draft.name=/x", "draft.name: '/x'; expected a name", "draft.name=my_draft"),
        ("~optim.lr", "optim.lr cannot be removed; expected a value: optim.lr=VALUE", ""),
        ("train.seed=99999999999999999999", "train.seed: 99999999999999999999", "train.seed=0"),
        ("run_dir=a=b", "cannot be parsed", "'run_dir=\"a=b\"'"),
        ("noise", "a word without a value: 'noise'; expected KEY=VALUE or GROUP=OPTION", "noise=..."),
        ("uniform0.05", "a word without a value: 'uniform0.05'", ""),
        (
            "noise=none,uniform0.05",
            "several values are a sweep: 'noise=none,uniform0.05'",
            "-m noise=none,uniform",
        ),
        ("train.seed=1,2", "several values are a sweep: 'train.seed=1,2'\n    try: -m train.seed=1,2", ""),
        ("model.aux_layer_ids=2,4", "several values are a sweep", "or model.aux_layer_ids=[2,4]"),
        (
            "model.aux_layer_ids=(2,4)",
            "cannot be parsed: 'model.aux_layer_ids=(2,4)'; expected KEY=VALUE",
            "",
        ),
        ("trainer.max_epochs=3", "unknown key trainer.max_epochs", "train.max_epochs=..."),
        (
            "model=Qwen/Qwen3-8B",
            "the group model has no option: 'Qwen/Qwen3-8B'",
            "model=qwen3_8b, or model=local model.name=NAME model.path=Qwen/Qwen3-8B",
        ),
        (
            "data=chat.jsonl",
            "the group data has no option: 'chat.jsonl'",
            "data=jsonl data.paths=[chat.jsonl]",
        ),
        ("train.tokens_per_update=3000", "", ""),
    ],
)
def test_a_planted_mistake_gets_its_message(override: str, says: str, proposes: str) -> None:
    found = problems_of("train", override)
    if override == "train.tokens_per_update=3000":
        assert found == []  # without a device count nothing can be said yet
        return
    assert len(found) == 1, found
    assert says in found[0]
    assert proposes in found[0]


def test_a_budget_that_is_no_multiple_of_the_devices_proposes_one() -> None:
    (message,) = problems_of(
        "train", "hardware=blackwell8", "train.seq_len=2048", "train.tokens_per_update=40000"
    )
    assert "multiple of 16384" in message
    assert "train.tokens_per_update=32768" in message


def test_help_shows_the_overrides_and_leaves_hydras_own_words_alone() -> None:
    compose.register()
    words = ["-cd", "sweeps", "-cn", "noise", "train.seed=7", "--help"]
    page = help_text("train", words, CHECKS["train"])
    assert "\n  seed: 7\n" in page
    assert "-cd sweeps -cn NAME" in page
    assert "\nlauncher: joblib, " in page
    assert "\nloss: ce, js, kl, lk, reverse_kl, sum, tv\n" in page


def test_help_of_an_evaluation_says_what_it_needs_as_it_is_typed() -> None:
    compose.register()
    page = help_text("evaluate", ["--help"], CHECKS["evaluate"])
    assert "    python evaluate.py draft=DIR " in page
    assert "\ndraft: ???\n" in page
    assert "draft_dir" not in page
    assert "sweeps" not in page


def test_words_stand_in_any_order() -> None:
    """Hydra's own parser takes overrides on one side of its options alone."""
    given = ["model=tiny", "-cd", "sweeps", "hardware=cpu", "-m", "draft.num_layers=1", "--cfg", "job"]
    assert command_line("train", given) == [
        "-cd", "sweeps", "-m", "--cfg", "job", "model=tiny", "hardware=cpu", "draft.num_layers=1",
    ]  # fmt: skip
    assert command_line("evaluate", ["-m", "draft=a,b", "decode.k=[1]"]) == [
        "-m",
        "draft_dir=a,b",
        "decode.k=[1]",
    ]


def test_all_problems_come_together_whatever_their_kind() -> None:
    found = problems_of("train", "optim.lr=abc", "draft=typo", "noise.scale=-1", "train.seq_len=-3", "+foo=1")
    assert len(found) == 5
    text = UserError(*found).render()
    assert text.startswith("5 problems:")


def test_a_misspelt_key_in_a_group_file_names_the_key(tmp_path: Path) -> None:
    extra = tmp_path / "noise"
    extra.mkdir()
    (extra / "mine.yaml").write_text("kind: uniform\nscales: 0.05\n")
    found = problems_of("train", f"hydra.searchpath=[file://{tmp_path}]", "noise=mine")
    assert len(found) == 1
    assert "noise" in found[0]


def test_missing_values_are_named() -> None:
    found = problems_of("extract", "model=local")
    assert any("model.name must be given" in message for message in found)


def test_evaluate_refuses_a_draft_that_is_not_there() -> None:
    (message,) = problems_of("evaluate", "draft=/nowhere")
    assert "draft is not a directory: '/nowhere'" in message
    found = problems_of("evaluate", "draft=", "prompts.name=..")  # no word is not the current directory
    assert "draft is not a directory: ''" in "\n".join(found)
    assert "prompts.name: '..'" in "\n".join(found)


@pytest.mark.parametrize("value", ["1e-4", "1.e-4", "0.0001", "1E-4"])
def test_a_learning_rate_is_a_float_by_every_spelling(value: str) -> None:
    compose.register()
    with initialize_config_dir(str(compose.config_directory()), version_base="1.3"):
        cfg = hydra_compose("train", overrides=[f"optim.lr={value}"])
    typed, problems = compose.to_typed(cfg, compose.ROOTS["train"])
    assert problems == []
    assert typed.optim.lr == 1e-4
    assert isinstance(typed.optim.lr, float)


def test_a_key_that_several_places_have_is_proposed_where_it_is_used_first() -> None:
    (message,) = problems_of("extract", "seed=1")
    assert "data.seed=..." in message  # not data.sampling.seed


def test_a_recipe_for_training_alone_is_told_apart_from_an_unknown_one() -> None:
    (message,) = problems_of("extract", "experiment=nemo")
    assert "the experiment is a recipe for train.py: 'nemo'" in message
    assert "experiment=kimi_k25_blackwell8" in message


def test_a_primary_configuration_that_is_not_there_is_named() -> None:
    compose.register()
    _, error = compose.try_compose("nope", [])
    assert error is not None
    (problem,) = compose.explain(error, "train", [], CHECKS["train"]).problems
    assert str(problem).startswith("there is no such configuration: 'nope'; expected a file of conf/")
    _, error = compose.try_compose("nois", [])
    assert error is not None
    (problem,) = compose.explain(error, "train", [], CHECKS["train"]).problems
    assert problem.fix == "-cd sweeps -cn noise"
