"""What the README promises: its commands compose, its table lists what `conf/` holds, its files exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from eagle3lab.config import compose
from eagle3lab.config.words import command_line

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = sorted(
    {
        line.strip().partition("#")[0].strip()
        for line in README.splitlines()
        if line.startswith("    python ") and "--" not in line and " -m " not in line.partition("train.py")[0]
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_of_the_readme_composes(command: str) -> None:
    words = shlex.split(command)[1:]
    entry, config, directory = (
        words[0].removesuffix(".py"),
        words[0].removesuffix(".py"),
        compose.config_directory(),
    )
    overrides = []
    rest = iter(words[1:])
    for word in rest:
        if word in ("-cd", "-cn"):
            value = next(rest)
            config, directory = (config, ROOT / value) if word == "-cd" else (value, directory)
        elif word != "-m":
            overrides.append(word)
    compose.register()
    swept = [o for o in overrides if compose._is_sweep(o)]
    plain = command_line(entry, [o for o in overrides if o not in swept])
    plain += [f"{o.partition('=')[0]}={value}" for o in swept for value in o.partition("=")[2].split(",")[:1]]
    path = f"hydra.searchpath=[file://{compose.config_directory()}]"
    with initialize_config_dir(str(directory), version_base="1.3"):
        cfg = hydra_compose(config, overrides=[*plain, *([path] if directory.name == "sweeps" else [])])
    typed, problems = compose.to_typed(cfg, compose.ROOTS[entry])
    assert problems == []
    assert typed is not None


def test_the_table_of_groups_is_complete() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| [^|]+ \| (.*) \|$", README, re.MULTILINE))
    groups = {p.name: p for p in (ROOT / "conf").iterdir() if p.is_dir()}
    assert set(groups) <= set(rows)
    for name, directory in groups.items():
        assert re.findall(r"`([^`]+)`", rows[name]) == sorted(p.stem for p in directory.glob("*.yaml"))


def test_every_file_the_readme_shows_exists() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_readme_has_exactly_two_set_up_commands() -> None:
    assert re.findall(r"^    (make \w+)", README, re.MULTILINE) == ["make demo", "make test"]
    assert "make test" in (ROOT / ".ci" / "run").read_text()
