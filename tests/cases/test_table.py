"""docs/cases.md names, for every case, the tests that hold it; this holds docs/cases.md."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

CASES = Path(__file__).parent
ROOT = CASES.parents[1]
TABLE = ROOT / "docs" / "cases.md"
# every public case of these kinds; none may be left out
WANTED = {
    "MASK": (1, 2, 3, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18),
    "DATA": (1, 2, 3, 4, 5, 6, 8, 10),
    "EXT": (1, 2, 3, 4, 5, 7, 8, 10, 11, 12, 13, 14, 16),
    "SEC": (1, 2),
    "TRN": (1, 3, 4, 6, 7, 9, 10, 11, 12, 14, 15, 16, 17, 18, 19),
    "PAR": (1, 2, 3, 4, 5),
    "CKP": (1, 2, 3, 4, 5, 7),
    "VOC": (1, 2, 3, 5, 6, 7),
    "EXP": (1, 2, 4, 5),
    "CFG": (1, 2, 3, 5, 6, 7, 8, 9, 10),
    "LOG": (1, 2, 3),
    "SLM": (1, 2),
}
NODE = re.compile(
    r"`(?:(?P<directory>[\w/]+)/)?(?P<file>test_\w+)::(?P<test>test_\w+)(?:\[(?P<ids>[\w-]+)\])?`"
)


def rows() -> dict[str, list[re.Match[str]]]:
    """Case id -> the tests named in its row."""
    found: dict[str, list[re.Match[str]]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| ([A-Z]+-\d\d) \|", line):
            assert match[1] not in found, f"{match[1]} has two rows"
            found[match[1]] = list(NODE.finditer(line))
    return found


def test_every_case_has_a_row_with_a_test() -> None:
    wanted = {f"{kind}-{number:02d}" for kind, numbers in WANTED.items() for number in numbers}
    directories = {path.parent.name for path in CASES.glob("*/case.yaml")}
    assert wanted <= directories
    assert set(rows()) == directories
    assert [case_id for case_id, tests in rows().items() if not tests] == []


@pytest.mark.parametrize("case_id", sorted(path.parent.name for path in CASES.glob("*/case.yaml")))
def test_every_named_test_exists_and_is_not_skipped(case_id: str) -> None:
    for node in rows()[case_id]:
        file = (ROOT / "tests" / node["directory"] if node["directory"] else CASES) / f"{node['file']}.py"
        text = file.read_text(encoding="utf-8")
        functions = {f.name: f for f in ast.walk(ast.parse(text)) if isinstance(f, ast.FunctionDef)}
        assert node["test"] in functions, f"{file.name} has no {node['test']}"
        marks = " ".join(ast.unparse(mark) for mark in functions[node["test"]].decorator_list)
        assert not re.search(r"\b(skip|skipif|xfail|slow)\b", marks)
        if node["ids"]:
            assert node["ids"] in text


def test_the_readable_names_of_the_tests_say_their_case() -> None:
    """A test named after a case stands in that case's row, so that the table cannot fall behind."""
    named = {(node["file"], node["test"]) for tests in rows().values() for node in tests}
    missing = []
    for file in sorted(CASES.glob("test_*.py")):
        for function in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(function, ast.FunctionDef) and re.match(r"test_[a-z]+_\d\d_", function.name):
                case_id = "-".join(function.name.split("_")[1:3]).upper()
                if (file.stem, function.name) not in named:
                    missing.append(f"{case_id}: {file.stem}::{function.name}")
    assert missing == []
