"""What the pages under `docs/` promise: their commands are right as far as a CPU goes, and print what they quote."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from pathlib import Path

import pytest

from eagle3lab import cli
from eagle3lab.commands import compare, store
from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS
from eagle3lab.config.words import command_line

from .config.option_files import _choices, typed

DOCS = Path(__file__).resolve().parents[1] / "docs"
ROOT = DOCS.parent
PAGES = {
    page.name: re.sub(r"\s*\\\n\s*", " ", page.read_text(encoding="utf-8"))  # one line, as a shell reads it
    for page in sorted(DOCS.rglob("*.md"))
}
COMMANDS = [
    (name, line.strip().partition(" #")[0].strip())
    for name, text in PAGES.items()
    for line in text.splitlines()
    if re.match(r"    (\S+=\S+ )*(python|torchrun|srun|vllm) ", line) and "-m venv" not in line
]
GUIDE = PAGES["kimi_k25_blackwell8.md"]
# what the guide says that a command prints
QUOTED: dict[str, str] = dict(
    re.findall(r"^    (python [^\n]*)\n\n```text\n(.*?)```", GUIDE, re.MULTILINE | re.DOTALL)
)


def words_of(command: str) -> tuple[str, list[str]]:
    """The entry (train, extract, evaluate, a command of `python -m eagle3lab`, vllm) and its words."""
    words = shlex.split(command)
    if words[0] == "vllm":
        return "vllm", words[1:]
    if "eagle3lab" in words:
        rest = words[words.index("eagle3lab") + 1 :]
        return rest[0], rest[1:]
    at = next(i for i, word in enumerate(words) if word.endswith(".py"))
    return words[at].removesuffix(".py"), words[at + 1 :]


def output_of(
    entry: str, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> str:
    """What the command prints, run in this process; it must not exit."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", os.environ.get("HYDRA_FULL_ERROR", "0"))
    monkeypatch.setenv("EAGLE3LAB_QUIET_ERRORS", "1")
    monkeypatch.setattr(sys, "argv", [f"{entry}.py", *words])
    monkeypatch.chdir(ROOT)
    capsys.readouterr()
    cli.main(entry)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS]
)
def test_a_command_of_a_page_runs_as_far_as_a_cpu_goes(
    page: str, command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """plan=true is run and prints what the guide quotes; other words are composed and checked, or parsed."""
    entry, words = words_of(command)
    if "plan=true" in words:
        printed = output_of(entry, words, monkeypatch, capsys).splitlines()
        assert any(line.startswith("plan of a") for line in printed)
        assert [line for line in QUOTED.get(command, "").splitlines() if line not in printed] == []
    elif entry in compose.ROOTS:
        first = [_choices(word)[0] for word in words if word != "-m"]  # of a sweep, its first job
        typed(entry, command_line(entry, first))
    elif entry == "doctor":
        compose.compose_alone("train", [w for w in words if not w.startswith("--")], CHECKS["train"])
    elif entry in ("store", "compare"):
        {"store": store, "compare": compare}[entry]._parser().parse_args(words)
    elif entry == "vllm":
        settings = json.loads(words[words.index("--speculative-config") + 1])
        assert (words[0], settings["method"]) == ("serve", "eagle3")
    else:
        assert entry == "rerun", command


def test_the_guide_has_its_commands() -> None:
    entries = [words_of(command)[0] for page, command in COMMANDS if PAGES[page] is GUIDE]
    assert {"train", "extract", "evaluate", "doctor", "store", "vllm"} <= set(entries)
    assert sorted(words_of(command)[0] for command in QUOTED) == ["extract", "train"]
    assert set(QUOTED) <= {command for _, command in COMMANDS}


def test_every_check_that_the_guide_names_is_one_of_the_doctors() -> None:
    source = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "eagle3lab" / "doctor").glob("*.py"))
    tables = re.findall(r"^\| line \|.*?\n\n", GUIDE, re.MULTILINE | re.DOTALL)
    named = [
        name
        for table in tables
        for row in table.strip().splitlines()[2:]
        for name in re.findall(r"`([^`]+)`", row.split("|")[1])
    ]
    assert len(named) > 15
    assert [name for name in named if f'"{name}"' not in source] == []


def test_the_messages_that_the_guide_quotes_are_in_the_code() -> None:
    code = "\n".join(p.read_text(encoding="utf-8") for p in (ROOT / "eagle3lab").rglob("*.py"))
    for message in (
        "vLLM returned states of another form",
        "the last state is post-norm",
        "another layer id convention",
        "the store is of other weights",
        "boundary_unstable",
        "does not fit beside the engine: the self-test uses hooks in the engine",
        "alignment self-test without a forward pass",
        "limited by",
    ):
        assert message in GUIDE
        assert message in code, message
