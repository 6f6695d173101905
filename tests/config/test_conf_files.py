"""Every file of `conf/` and `sweeps/` composes, validates, and starts with the command that uses it (by walking)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from itertools import combinations, product
from pathlib import Path

import pytest

from eagle3lab.config import compose
from eagle3lab.config.options import options_of
from eagle3lab.config.words import command_line

from .option_files import (
    CONF,
    CONF_FILES,
    SWEEP_FILES,
    SWEEPS,
    check_jobs,
    command_of,
    entry_of,
    jobs_of,
    own_overrides,
    problems_of,
    typed,
)


@pytest.mark.parametrize("path", CONF_FILES, ids=str)
def test_the_command_at_the_top_of_a_file_composes_and_validates(path: Path) -> None:
    words = command_of(CONF / path)
    if words[0] == "torchrun":
        words = words[words.index("train.py") - 1 :]
    entry = entry_of(words)
    overrides = [
        w.replace("draft=DIR", "draft=conf").replace("outputs/NAME/STAMP/draft", "conf") for w in words[2:]
    ]
    group = path.parent.as_posix()
    if group.startswith("experiment/"):  # what extract.py takes of one, and what both commands share
        assert (CONF / "experiment" / path.name).is_file()
        group = "experiment"
    if group != ".":
        used = [w for w in overrides if re.match(rf"{re.escape(group)}(\.|=)", w)]
        assert used, "the command must use the file's group"
    typed(entry, command_line(entry, [o for o in overrides if not o.startswith("-")]))


@pytest.mark.parametrize(
    "path", [p for p in CONF_FILES if p.parent.name in ("model", "hardware", "draft", "data")], ids=str
)
def test_an_option_says_its_own_name(path: Path) -> None:
    text = (CONF / path).read_text()
    name = re.search(r"^name: (\S+)", text, re.MULTILINE)
    assert name is not None
    assert name.group(1) in (path.stem, "???")


@pytest.mark.parametrize("path", SWEEP_FILES, ids=str)
def test_a_sweep_starts_with_its_question_and_every_one_of_its_jobs_validates(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = command_of(SWEEPS / path)
    assert path.stem in words or any(path.name in word for word in words), "the command must use the file"
    assert "?" in "".join((SWEEPS / path).read_text().splitlines()[:4]), "a sweep answers a question"
    jobs = list(jobs_of(path))
    primary = (path.stem, SWEEPS / path.parent) if "-cn" in words else ("train", CONF)
    check_jobs(jobs, *primary)
    assert jobs
    assert len({tuple(job) for job in jobs}) == len(jobs)
    with capsys.disabled():
        print(f"sweeps/{path}: {len(jobs)} jobs checked")


def test_options_of_different_groups_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    """Every pair of options of two groups, and every experiment on every model and every hardware."""
    checked = 0
    sizes = Counter(path.parent.as_posix() for path in CONF_FILES)
    parts: dict[str, list[object]] = {}  # of every group, in typed form; a group is the same for all commands
    for entry, root in compose.ROOTS.items():
        extra = ["draft_dir=conf"] if entry == "evaluate" else []
        groups = sorted({f.name for f in dataclasses.fields(root)} & set(sizes))
        for path in CONF_FILES:
            group = path.parent.as_posix()
            if group in groups and (group not in parts or len(parts[group]) < sizes[group]):
                config = typed(entry, [*own_overrides(path), *extra])
                parts.setdefault(group, []).append(getattr(config, group))
        default = typed(entry, extra)
        for one, other in combinations(groups, 2):
            for a, b in product(parts[one], parts[other]):
                combined = dataclasses.replace(default, **{one: a, other: b})
                assert problems_of(combined, entry) == [], (a, b)
                checked += 1
    for entry, path in (
        (e, p) for e in ("train", "extract") for p in CONF_FILES if p.parent.name == "experiment"
    ):
        if path.stem not in options_of("experiment", entry):
            continue
        recipe = typed(entry, [f"experiment={path.stem}"])
        for model, hardware in product(parts["model"], parts["hardware"]):
            combined = dataclasses.replace(recipe, model=model, hardware=hardware)
            assert problems_of(combined, entry) == [], (path, model, hardware)
            checked += 1
    assert checked > 1000
    with capsys.disabled():
        print(f"conf/: {len(CONF_FILES)} files, {checked} combinations of options checked")
