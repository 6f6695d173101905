"""Every file of `conf/` composes, validates, and starts with the command that uses it (found by walking)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from eagle3lab.config import compose
from eagle3lab.config.check import CHECKS

CONF = compose.config_directory()
FILES = sorted(path.relative_to(CONF) for path in CONF.rglob("*.yaml"))


def command_of(path: Path) -> list[str]:
    """The words of the command in a file's first lines."""
    lines = (CONF / path).read_text().splitlines()
    command = next(line for line in lines[:2] if line.startswith("# ") and ".py" in line)
    return shlex.split(command[2:])


@pytest.mark.parametrize("path", FILES, ids=str)
def test_the_command_at_the_top_of_a_file_composes_and_validates(path: Path) -> None:
    words = command_of(path)
    if words[0] == "torchrun":
        words = words[words.index("train.py") - 1 :]
    entry = words[1].removesuffix(".py")
    overrides = [
        w.replace("draft=DIR", "draft=conf").replace("outputs/NAME/STAMP/draft", "conf") for w in words[2:]
    ]
    overrides = compose.command_line(entry, overrides)
    group = path.parent.name
    if group:
        assert any(re.match(rf"{group}(\.|=)", w) for w in overrides), "the command must use the file's group"
    compose.register()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = hydra_compose(entry, overrides=[o for o in overrides if not o.startswith("-")])
    typed, problems = compose.to_typed(cfg, compose.ROOTS[entry])
    problems = [*problems, *(CHECKS[entry](typed) if typed is not None else [])]
    assert [str(p) for p in problems if "is not a directory" not in str(p)] == []


@pytest.mark.parametrize(
    "path", [p for p in FILES if p.parent.name in ("model", "hardware", "draft", "data")], ids=str
)
def test_an_option_says_its_own_name(path: Path) -> None:
    text = (CONF / path).read_text()
    name = re.search(r"^name: (\S+)", text, re.MULTILINE)
    assert name is not None
    assert name.group(1) in (path.stem, "???")
