"""Which names of other libraries our own code really uses, read from the code itself."""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import eagle3lab

PACKAGE = Path(eagle3lab.__file__).resolve().parent
# Libraries whose names move between releases.
LIBRARIES = ("transformers", "speculators", "lightning", "vllm")
# The rooms whose code a command runs; what those import is followed.
ROOMS = {"extract": ("extract",), "train": ("training", "experiments", "extract")}
_IMPORT_ERRORS = {"ImportError", "ModuleNotFoundError", "AttributeError", "Exception"}


@dataclass(frozen=True, order=True)
class Symbol:
    """`name` of `module` (the module itself where empty); `optional`: the code goes on without it."""

    module: str
    name: str
    where: str  # file:line of one use, relative to the package
    optional: bool

    @property
    def library(self) -> str:
        return self.module.partition(".")[0]

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def used_symbols(files: Collection[Path], package: Path = PACKAGE) -> list[Symbol]:
    """Every name of LIBRARIES that `files` import or reach through an imported module, each once.

    Imports only for type checkers do not count. A name is optional where every use of it is guarded by a
    handler of ImportError.
    """
    found: dict[str, Symbol] = {}
    for file in sorted(files):
        for symbol in _symbols_of(file, package):
            key = str(symbol)
            if key not in found or (found[key].optional and not symbol.optional):
                found[key] = symbol
    return sorted(found.values())


def all_files(package: Path = PACKAGE) -> list[Path]:
    return sorted(package.rglob("*.py"))


def files_of(command: str, package: Path = PACKAGE) -> set[Path]:
    """The files of a command's rooms and all they import within the package, lazy imports included."""
    open_files = [file for room in ROOMS[command] for file in (package / room).rglob("*.py")]
    reached: set[Path] = set()
    while open_files:
        file = open_files.pop()
        if file not in reached:
            reached.add(file)
            open_files += _own_imports(file, package)
    return reached


@functools.cache
def _parse(file: Path) -> ast.Module:
    return ast.parse(_read(file))


@functools.cache
def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8")


@functools.cache
def _nodes_of(file: Path) -> tuple[tuple[ast.AST, bool], ...]:
    return tuple(_nodes(_parse(file)))


def _own_imports(file: Path, package: Path) -> Iterator[Path]:
    for node, _ in _nodes_of(file):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, file, package)
            names = [base, *(f"{base}.{alias.name}" for alias in node.names)]
        for name in names:
            head, *parts = name.split(".")
            if head == package.name:
                target = package.joinpath(*parts)
                yield from (f for f in (target.with_suffix(".py"), target / "__init__.py") if f.is_file())


def _absolute(node: ast.ImportFrom, file: Path, package: Path) -> str:
    if not node.level:
        return node.module or ""
    parents = file.relative_to(package.parent).parts[: -node.level]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _symbols_of(file: Path, package: Path) -> Iterator[Symbol]:
    if not any(library in _read(file) for library in LIBRARIES):
        return
    where = str(file.relative_to(package))
    nodes, texts = _nodes_of(file), _constants(_parse(file))
    origins: dict[str, tuple[str, str]] = {}  # local name -> the module and the name in it that it stands for
    for node, optional in nodes:
        place = f"{where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.ImportFrom) and not node.level and _wanted(node.module or ""):
            for alias in node.names:
                origins[alias.asname or alias.name] = str(node.module), alias.name
                yield Symbol(str(node.module), alias.name, place, optional)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if _wanted(alias.name):
                    head = alias.name.partition(".")[0]
                    origins[alias.asname or head] = (alias.name if alias.asname else head), ""
                    yield Symbol(alias.name, "", place, optional)
        elif isinstance(node, ast.Call):
            module = _imported_by_call(node, texts)
            if _wanted(module):
                yield Symbol(module, "", place, optional)
    inner: set[ast.AST] = set()  # parts of a chain that was seen from its outer end
    for node, optional in nodes:
        if isinstance(node, ast.Attribute) and node not in inner:
            chain, root = _chain(node, inner)
            if root in origins and isinstance(node.ctx, ast.Load):
                module, name = origins[root]
                full = ".".join([name, *chain] if name else chain)
                yield Symbol(module, full, f"{where}:{node.lineno}", optional)


def _wanted(module: str) -> bool:
    return module.partition(".")[0] in LIBRARIES


def _constants(tree: ast.Module) -> dict[str, str]:
    """The file's top-level names that stand for a text."""
    return {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, str)
    }


def _imported_by_call(node: ast.Call, texts: dict[str, str]) -> str:
    """The module of `import_module("name")`, or of a constant's name in it; empty for anything else."""
    called = node.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name != "import_module" or not node.args:
        return ""
    argument = node.args[0]
    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        return argument.value
    return texts.get(argument.id, "") if isinstance(argument, ast.Name) else ""


def _chain(node: ast.expr, inner: set[ast.AST]) -> tuple[list[str], str]:
    """`a.b.c` as (["b", "c"], "a"); the root is empty where it is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
        inner.add(node)
    return names, node.id if isinstance(node, ast.Name) else ""


def _nodes(tree: ast.AST, optional: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Every node that runs, outer ones first, and whether a failing import there is handled."""
    for node in ast.iter_child_nodes(tree):
        yield from _walk(node, optional)


def _walk(node: ast.AST, optional: bool) -> Iterator[tuple[ast.AST, bool]]:
    if isinstance(node, ast.If) and _chain(node.test, set()) in (
        ([], "TYPE_CHECKING"),
        (["TYPE_CHECKING"], "typing"),
    ):
        for other in node.orelse:
            yield from _walk(other, optional)
        return
    yield node, optional
    if isinstance(node, ast.Try):
        for part in node.body:
            yield from _walk(part, optional or _handles_import_errors(node))
        for rest in (*node.handlers, *node.orelse, *node.finalbody):
            yield from _walk(rest, optional)
    else:
        yield from _nodes(node, optional)


def _handles_import_errors(node: ast.Try) -> bool:
    """Whether a missing name is caught here, and not only to be raised again as another error."""
    for handler in node.handlers:
        names = {n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)} if handler.type else {""}
        raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(handler))
        if (not handler.type or names & _IMPORT_ERRORS) and not raises:
            return True
    return False
