"""Symbols are read from code: what runs counts, what only a type checker sees does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3lab.doctor.check import Check, Status
from eagle3lab.doctor.libraries import check_symbols, try_symbols
from eagle3lab.doctor.symbols import LIBRARIES, PACKAGE, Symbol, all_files, files_of, used_symbols

CODE = """
from __future__ import annotations
from typing import TYPE_CHECKING
import importlib
import transformers
import lightning.pytorch as pl
from transformers import AutoTokenizer as Tok

DEEP = "vllm.config.speculative"
if TYPE_CHECKING:
    from speculators import OnlyATypeName

def late():
    from vllm import LLM
    LLM.generate
    importlib.import_module(DEEP)
    pl.Trainer.fit
    Tok.from_pretrained("x")
    return transformers.models.llama

try:
    from transformers import Perhaps
except ImportError:
    Perhaps = None

try:
    from transformers import Needed
except ImportError as error:
    raise RuntimeError from error
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    root = tmp_path / "house"
    for name, text in {
        "__init__.py": "",
        "extract/__init__.py": "",
        "extract/run.py": "from ..rows import reading\nfrom .near import thing\n",
        "extract/near.py": "def f():\n    import house.engines.hf\n",
        "rows/__init__.py": "",
        "rows/reading.py": "",
        "rows/unused.py": "",
        "engines/__init__.py": "",
        "engines/hf.py": CODE,
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_every_way_of_using_a_name_is_seen(package: Path) -> None:
    found = {str(s): s.optional for s in used_symbols(all_files(package), package)}
    assert found == {
        "lightning.pytorch": False,
        "lightning.pytorch.Trainer.fit": False,
        "transformers": False,
        "transformers.AutoTokenizer": False,
        "transformers.AutoTokenizer.from_pretrained": False,
        "transformers.Needed": False,
        "transformers.Perhaps": True,
        "transformers.models.llama": False,
        "vllm.LLM": False,
        "vllm.LLM.generate": False,
        "vllm.config.speculative": False,
    }


def test_a_commands_files_are_its_room_and_what_that_imports(package: Path) -> None:
    names = {str(file.relative_to(package)) for file in files_of("extract", package)}
    assert {"extract/run.py", "extract/near.py", "rows/reading.py", "engines/hf.py"} <= names
    assert "rows/unused.py" not in names


def test_no_import_statement_of_ours_is_missed() -> None:
    """Against a plain search of the text, which knows nothing of syntax trees."""
    found = {str(symbol) for symbol in used_symbols(all_files())}
    names = "|".join(LIBRARIES)
    line = re.compile(rf"^ *from ((?:{names})[\w.]*) import ([\w, ]+)$", re.MULTILINE)
    wanted = {
        f"{module}.{name.split(' as ')[0].strip()}"
        for file in all_files()
        for module, names in line.findall(re.sub(r"if TYPE_CHECKING:\n(    .*\n|\n)+", "", file.read_text()))
        for name in names.split(",")
    }
    assert len(wanted) > 15
    assert wanted <= found
    assert not any("doctor" in symbol.where for symbol in used_symbols(all_files()))


def test_training_reaches_lightning_and_speculators_and_extraction_neither() -> None:
    train = {symbol.library for symbol in used_symbols(files_of("train"))}
    extract = {symbol.library for symbol in used_symbols(files_of("extract"))}
    assert {"lightning", "speculators", "transformers"} <= train
    assert not {"lightning", "speculators"} & extract
    assert PACKAGE.name == "eagle3lab"


def test_every_symbol_of_ours_is_there() -> None:
    checks = list(check_symbols())
    assert {"transformers", "speculators", "lightning", "vllm", "speculators signatures"} <= {
        check.name for check in checks
    }
    assert all(check.status is Status.ok for check in checks), checks


def test_a_missing_symbol_is_named_with_its_place_and_remedy(
    monkeypatch: pytest.MonkeyPatch, named: Callable[..., Check]
) -> None:
    import lightning.pytorch.callbacks

    monkeypatch.delattr(lightning.pytorch.callbacks, "RichProgressBar")
    check = named(list(check_symbols(libraries=["lightning"])), "lightning")
    assert check.status is Status.fail
    assert (
        "lightning.pytorch.callbacks.RichProgressBar is missing, used in training/trainer.py:" in check.found
    )
    assert check.remedy == "pip install 'lightning<2.7,>=2.6'"


def test_an_optional_symbol_may_be_absent_and_a_library_that_is_optional_too() -> None:
    symbols = [
        Symbol("transformers", "NoSuchThing", "rows/x.py:1", True),
        Symbol("transformers", "AutoTokenizer", "rows/x.py:2", False),
    ]
    assert "2 symbols, 1 optional ones absent" in str(try_symbols("transformers", symbols))
