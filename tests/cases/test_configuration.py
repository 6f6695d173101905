"""CFG cases of one command: types, quoting, unknown keys, flags, precedence and paths, as `train.py` reads them."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_run import expected
from omegaconf import OmegaConf

from eagle3lab import cli
from eagle3lab.config.errors import EXIT_USER_ERROR
from eagle3lab.config.invocation import Invocation, named
from eagle3lab.draft.export import read_export
from eagle3lab.experiments import lifecycle
from eagle3lab.training.checkpoint_files import BEST, LAST, PREVIOUS

CASES = Path(__file__).parent
Command = Callable[..., Any]
Seen = list[Any]  # typed configurations that reached `run_train`, in order
# the names of the cases' commands -> ours (POLICY P8); a path of a checkpoint is here one of a run
OURS = {
    "train.lr": "optim.lr", "train.epochs": "train.max_epochs", "train.steps": "train.max_updates",
    "data.id": "data.name", "data.path": "data.paths", "train.resume": "run_dir", "run.name": "run_name",
    "run.note": "run_name", "train.lerning_rate": "train.lerning_rate", "train": "optim",
}  # fmt: skip


@pytest.fixture
def configured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[Seen, int, str]]:
    """Run `train.py WORDS` up to where training would begin: configurations, exit code, what was said."""

    def run(*words: str, invocations: list[Invocation] | None = None) -> tuple[Seen, int, str]:
        seen: Seen = []

        def training(cfg: Any, invocation: Invocation) -> float:
            seen.append(named(cfg, invocation))
            if invocations is not None:
                invocations.append(invocation)
            return 0.0

        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(cli, "run_train", training)
            patch.setattr("sys.argv", ["train.py", *words, "plan=true"])  # a plan claims nothing
            patch.delenv("EAGLE3LAB_STAMP", raising=False)
            for name in ("HYDRA_FULL_ERROR", "EAGLE3LAB_QUIET_ERRORS"):
                patch.setenv(name, "")
                patch.delenv(name)
            capsys.readouterr()
            try:
                cli.main("train")
                code = 0
            except SystemExit as end:
                code = int(end.code or 0)
        said = capsys.readouterr()
        return seen, code, said.out + said.err

    return run


def commands(case: str) -> list[list[str]]:
    """The words of every line of commands.txt, the case's names mapped to ours."""
    lines = (CASES / case / "commands.txt").read_text(encoding="utf-8").splitlines()
    return [[_ours(word) for word in shlex.split(line, comments=case == "CFG-08")[1:]] for line in lines]


def _ours(word: str) -> str:
    plus, key, value = re.fullmatch(r"(\+*)([\w./]+)=(.*)|.*", word, re.DOTALL).groups()  # type: ignore[union-attr]
    if key is None or key not in OURS:
        return word
    if OURS[key] == "data.paths":
        value = f"[{value}]"
    return f"{plus}{OURS[key]}={value}"


def test_cfg_01_a_rate_is_a_float_by_every_path(configured: Any, tmp_path: Path) -> None:
    case, lines = expected("CFG-01"), commands("CFG-01")
    for words, wanted in zip(lines[:4], case["lr_values"], strict=True):
        seen, code, said = configured(*words)
        assert code == 0, said
        rates = [cfg.optim.lr for cfg in seen]
        assert rates == (wanted if isinstance(wanted, list) else [wanted])
        assert {type(rate) for rate in rates} == {float}
    _, code, said = configured(*lines[4])
    assert code == EXIT_USER_ERROR
    assert "train.max_epochs has the wrong type: '3.0'; expected a whole number" in said
    quoted = configured(*lines[5])[0][0].optim.lr
    assert (quoted, type(quoted)) == (1e-4, float)
    assert configured(*lines[6])[0][0].data.name == "007"
    _, code, said = configured(*lines[7])
    assert code == EXIT_USER_ERROR
    assert "optim.lr: nan" in said
    assert configured(*lines[8])[0][0].train.max_updates == case["steps=1_000"]

    # a YAML file, what a run stores of it, and what W&B gets
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "mine.yaml").write_text("lr: 1e-4\n")
    cfg = configured("-cd", str(tmp_path), "optim=mine")[0][0]
    stored = OmegaConf.create(OmegaConf.to_yaml(OmegaConf.structured(cfg)))
    sent = json.loads(json.dumps(lifecycle._plain(cfg)))
    for value in (cfg.optim.lr, stored.optim.lr, sent["optim"]["lr"]):
        assert (value, type(value)) == (1e-4, float)


def test_cfg_01_the_traps_of_plain_yaml_are_the_known_ones() -> None:
    """Our files are read by OmegaConf, for which 1e-4 is a number; PyYAML alone would give a string."""
    case, file = expected("CFG-01"), CASES / "CFG-01" / "plain.yaml"
    read = OmegaConf.load(file)
    for key, wanted in case["plain_yaml_with_OmegaConf"].items():
        assert read[key] == (int(wanted.split()[0]) if isinstance(wanted, str) else wanted)
    assert yaml.safe_load(file.read_text())["a"] == "1e-4"


def test_cfg_02_values_with_the_grammars_own_characters(configured: Any, tmp_path: Path) -> None:
    case, lines = expected("CFG-02"), commands("CFG-02")
    for number in (1, 2):
        seen, code, said = configured(*lines[number - 1])
        assert code == 0, said
        assert seen[0].run_dir == str(tmp_path / case[str(number)])
    _, code, said = configured(*lines[2])
    assert code == EXIT_USER_ERROR
    assert """try: 'run_dir="runs/epoch=0-step=10.ckpt"'""" in said
    assert configured(*lines[3])[0][0].data.paths == [str(tmp_path / case["4"])]
    assert configured(*lines[4])[0][0].run_name == case["5"]
    seen, code, said = configured(*lines[5])
    assert [cfg.run_name for cfg in seen] == case["6"], said
    _, code, said = configured(*lines[6])
    assert code == EXIT_USER_ERROR
    assert "run_name holds ${...} that names no key" in said
    assert "Traceback" not in said
    assert configured(lines[6][0].replace("${", r"\${"))[0][0].run_name == "price ${PRICE} and {x}"
    # a backslash stays what was typed
    assert configured(*lines[7])[0][0].data.paths == [str(tmp_path / r"C:\\temp\\new.jsonl")]
    assert not [name for name in (LAST, PREVIOUS, BEST) if "=" in name]


def test_cfg_02_directories_of_runs_are_safe_and_stay_distinct(configured: Any, tmp_path: Path) -> None:
    names = ["a/b", "a,b", "a= #b", "a_b", "../b"]
    seen, code, said = configured("-m", "run_name=" + ",".join(f"'{name}'" for name in names))
    assert code == 0, said
    folders = [Path(cfg.run_dir).name for cfg in seen]
    assert len(set(folders)) == len(names)
    assert all(re.fullmatch(r"\d\d-[\w.+-]+", folder) for folder in folders)
    alone = [Path(configured(f"run_name='{name}'")[0][0].run_dir) for name in names[::2]]
    assert len({path.parent.name for path in alone}) == len(alone)
    assert {path.parent.parent for path in alone} == {tmp_path / "outputs"}


def test_cfg_05_a_misspelt_key_or_option_is_an_error(configured: Any, tmp_path: Path) -> None:
    lines = commands("CFG-05")
    for words in lines[:2]:
        seen, code, said = configured(*words)
        assert (seen, code) == ([], EXIT_USER_ERROR)
        assert "unknown key train.lerning_rate" in said
        assert "try: optim.lr=..." in said
    for words, options in ((lines[2], "one of eagle3, eagle31"), (lines[3], "gaussian0.05")):
        seen, code, said = configured(*words)
        assert (seen, code) == ([], EXIT_USER_ERROR)
        assert options in said
    before, after = configured()[0][0].optim, configured(*lines[4])[0][0].optim
    assert (after.lr, after.grad_clip_norm, after.betas) == (1e-4, before.grad_clip_norm, before.betas)
    extra = yaml.safe_load((CASES / "CFG-05" / "extra.yaml").read_text())["train"]
    (tmp_path / "optim").mkdir()
    (tmp_path / "optim" / "extra.yaml").write_text(yaml.safe_dump(extra))
    seen, code, said = configured("-cd", str(tmp_path), "optim=extra")
    assert (seen, code) == ([], EXIT_USER_ERROR)
    assert "unknown key optim.warmup_step" in said


def test_cfg_06_a_flag_that_is_on_can_be_switched_off(configured: Any) -> None:
    case, lines = expected("CFG-06"), commands("CFG-06")
    for number, words in enumerate(lines[:5], 1):
        seen, code, said = configured(*words)
        assert code == 0, said
        assert seen[0].draft.norm_before_residual is False, case[str(number)]
    seen, code, said = configured(*lines[5])
    assert (seen, code) == ([], EXIT_USER_ERROR)
    assert "draft.norm_before_residual cannot be null" in said


@pytest.fixture
def small_run(extract_command: Command, tmp_path: Path) -> Callable[..., Any]:
    """`train.py` on the rows of CKP-01 with the case's verifier, one update, into `tmp_path / NAME`."""
    extract_command("CKP-01", "data.validation_share=0")

    def train(name: str, *more: str, expect: int = 0) -> Any:
        quick = (
            "data.validation_share=0",
            "train.self_test=false",
            "train.seq_len=256",
            "train.max_updates=1",
            "optim.lr_warmup_updates=0",
        )
        words = (*quick, f"run_dir={tmp_path / name}", *more)
        return extract_command("CKP-01", *words, entry="train", expect=expect)

    return train


def test_cfg_06_cfg_07_the_stored_configuration_is_what_the_exported_draft_is(
    small_run: Callable[..., Any], tmp_path: Path
) -> None:
    small_run("run", "draft.norm_before_residual=false", "draft.num_layers=2", "draft.vocab_size=100")
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["draft"]
    exported, tensors = read_export(tmp_path / "run" / "draft")
    assert stored["norm_before_residual"] is exported["norm_before_residual"] is False
    assert stored["num_layers"] == exported["transformer_layer_config"]["num_hidden_layers"] == 2
    assert stored["vocab_size"] == exported["draft_vocab_size"] == len(tensors["lm_head.weight"])

    # what is given beside a draft that is there is never dropped: it goes on as it is, or not at all
    other = ("draft.norm_before_residual=false", "draft.num_layers=1", "draft.vocab_size=100")
    refused = small_run("run", *other, "resume=true", "train.max_updates=2", expect=EXIT_USER_ERROR)
    assert "num_layers" in refused.out + refused.err


def test_cfg_07_settings_beside_a_pretrained_draft_are_never_ignored(configured: Any) -> None:
    given = yaml.safe_load((CASES / "CFG-07" / "override.yaml").read_text())["draft"]
    applied = given.pop("aux_layer_ids")
    words = [f"draft.{key}={value}" for key, value in given.items()]
    seen, code, said = configured(*words, f"draft.aux_layer_ids={applied}")
    assert (seen, code) == ([], EXIT_USER_ERROR)
    assert [key for key in given if f"unknown key draft.{key}" not in said] == []
    assert configured(f"draft.aux_layer_ids={applied}")[0][0].draft.aux_layer_ids == applied


def test_cfg_07_what_a_file_says_itself_wins_over_what_it_is_based_on(
    configured: Any, tmp_path: Path
) -> None:
    base, order = (
        yaml.safe_load((CASES / "CFG-07" / f"{n}.yaml").read_text()) for n in ("base", "conf_order")
    )

    def ours(train: dict[str, Any]) -> dict[str, Any]:
        keys = {"lr": ("optim", "lr"), "epochs": ("train", "max_epochs")}
        found: dict[str, Any] = {}
        for key, value in train.items():
            found.setdefault(keys[key][0], {})[keys[key][1]] = value
        return found

    (tmp_path / "base.yaml").write_text(yaml.safe_dump(ours(base["train"])))
    primary = {"defaults": ["train", *order["defaults"]], **ours(order["train"])}
    (tmp_path / "conf_order.yaml").write_text("# @package _global_\n" + yaml.safe_dump(primary))
    cfg = configured("-cd", str(tmp_path), "-cn", "conf_order")[0][0]
    wanted = expected("CFG-07")["conf_order"]
    assert (cfg.optim.lr, cfg.train.max_epochs) == (wanted["train.lr"], wanted["train.epochs"])


def test_cfg_10_a_relative_path_is_that_of_the_call(
    configured: Any, extract_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = commands("CFG-10")
    for words in lines[:3]:
        seen, code, said = configured(*words)
        assert code == 0, said
        assert {tuple(cfg.data.paths) for cfg in seen} == {(str(tmp_path / "data.jsonl"),)}
        text = OmegaConf.to_yaml(OmegaConf.structured(seen[0]))  # as a run stores it
        assert yaml.safe_load(text)["data"]["paths"] == [str(tmp_path / "data.jsonl")]
    assert len(seen) == 2
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    seen, code, said = configured(*lines[3])
    assert (seen, code) == ([], EXIT_USER_ERROR)  # a grammar without ~, so the message shows the quoted form
    quoted = "data.paths=['~/data.jsonl']"
    assert configured(quoted)[0][0].data.paths == [str(tmp_path / "home" / "data.jsonl")]

    def no_model(*_: Any, **__: Any) -> None:
        raise AssertionError("an engine was started for a file that is not there")

    monkeypatch.setattr("eagle3lab.engines.select.build_engine", no_model, raising=False)
    (tmp_path / "data.jsonl").write_bytes((CASES / "CFG-10" / "data.jsonl").read_bytes())
    for name, says in (("data.jsonl ", "'data.jsonl '"), ("absent.jsonl", str(tmp_path / "absent.jsonl"))):
        refused = extract_command("CKP-01", f"data.paths=['{name}']", expect=EXIT_USER_ERROR)
        assert says in refused.err
        assert not refused.store.exists()
