"""The house's direction of imports, read from the code."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "eagle3lab"
LEVELS = (
    {"config"},
    {"store", "verifier"},
    {"engines", "rows", "data", "draft"},
    {"extract", "training", "evaluate", "experiments"},
    {"doctor"},  # tries the loop in miniature
    {"under_hydra"},  # what Hydra does around a command, and around the trials of a sweep
    {"cli", "commands"},
)
LEVEL = {room: i for i, rooms in enumerate(LEVELS) for room in rooms}
FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str:
    relative = path.relative_to(PACKAGE)
    return relative.parts[0] if len(relative.parts) > 1 else relative.stem


def imported(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Absolute names of everything a file imports; relative imports stay within the room."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = tree.body if top_level_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_room_imports_only_rooms_below_it(path: Path) -> None:
    room = room_of(path)
    if room not in LEVEL:
        return
    for name in imported(path):
        if name.startswith("eagle3lab."):
            other = name.split(".")[1]
            assert other == room or LEVEL[other] < LEVEL[room], f"{room} imports {name}"


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("lightning", {"training"}),
        ("speculators", {"draft/speculators_model.py"}),
        ("vllm", {"engines/vllm.py", "engines/vllm_cpu_connector.py"}),
    ],
)
def test_an_unstable_dependency_has_one_room(package: str, allowed: set[str]) -> None:
    users = {p for p in FILES if any(n.split(".")[0] == package for n in imported(p))}
    for path in users:
        relative = path.relative_to(PACKAGE)
        assert str(relative) in allowed or relative.parts[0] in allowed, f"{relative} imports {package}"


def test_configuration_needs_no_torch() -> None:
    heavy = {"torch", "transformers", "lightning", "speculators", "numpy", "safetensors"}
    for path in (PACKAGE / "config").glob("*.py"):
        assert not heavy & {n.split(".")[0] for n in imported(path)}, path


def test_the_command_line_imports_nothing_heavy_before_it_must() -> None:
    rooms = {
        n.split(".")[1]
        for file in ("cli.py", "under_hydra.py")
        for n in imported(PACKAGE / file, top_level_only=True)
        if n.startswith("eagle3lab.")
    }
    assert rooms <= {"config", "experiments", "under_hydra"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_file_is_short_enough_to_read(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    allowed = {"config/schema.py": 450}  # every key of the configuration, on one page
    assert len(lines) <= allowed.get(str(path.relative_to(PACKAGE)), 300)
    assert all(line.isascii() for line in lines), "ASCII only"


def test_there_is_no_drawer_for_everything() -> None:
    assert not [p for p in FILES if p.stem in ("utils", "util", "helpers", "misc", "common")]
