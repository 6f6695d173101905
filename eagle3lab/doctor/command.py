"""`python -m eagle3lab doctor [GROUP=OPTION ...] [--json] [--quick]`"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import eagle3lab

from .check import INSTALL, Check, examine, exit_code, fail
from .report import as_json, describe, summarise

if TYPE_CHECKING:
    from eagle3lab.config.schema import TrainRoot

DISK_MIB, QUICK_DISK_MIB = 64, 8
DESCRIPTION = """Check in layers whether this machine, verifier and store are fit for a run; every finding
names its remedy. Takes the words of train.py (model=... data=... hardware=... store=...)."""
EPILOG = "exit code: 0 all ok or warnings only, 2 a check failed or the words are wrong"


def main(argv: Sequence[str]) -> int:
    """Run every layer; returns the exit code. Raises UserError for words that no configuration knows."""
    parser = argparse.ArgumentParser("python -m eagle3lab doctor", description=DESCRIPTION, epilog=EPILOG)
    parser.add_argument("words", nargs="*", metavar="GROUP=OPTION", help="overrides as train.py takes them")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout instead of text")
    parser.add_argument(
        "--quick", action="store_true", help="without the loop in miniature, a shorter disk test"
    )
    arguments = parser.parse_intermixed_args(list(argv))
    start = time.perf_counter()
    checks: list[Check] = []
    layer = ""
    with contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext():
        for check in all_checks(arguments.words, quick=arguments.quick):
            checks.append(check)
            if arguments.json:
                continue
            if check.layer != layer:
                layer = check.layer
                print(layer)
            print(describe(check), flush=True)
    seconds = time.perf_counter() - start
    if arguments.json:
        print(as_json(checks, seconds, eagle3lab.__version__))
    else:
        print(summarise(checks, seconds))
    return exit_code(checks)


def all_checks(words: Sequence[str], *, quick: bool = False) -> Iterator[Check]:
    """Every layer in order. What is imported is imported layer by layer, so that a broken package is a
    finding of its layer and the layers that do not need it still run.

    Raises UserError before the first check when the words make no valid configuration.
    """
    cfg, broken = _compose(words)
    yield from _layer("packages", _packages)
    yield from _layer("symbols", _symbols)
    if broken or cfg is None:
        yield examine("configuration", "train.py", lambda: fail(f"cannot be composed: {broken}", INSTALL), "")
        return
    yield from _layer("machine", lambda: _machine(cfg, quick))
    yield from _layer("verifier", lambda: _verifier(cfg))
    yield from _layer("store", lambda: _store(cfg, words))
    if not quick:
        yield from _layer("miniature", lambda: _miniature(cfg))


def _layer(layer: str, checks: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a layer; one that cannot even be imported is one failure."""
    try:
        yield from checks()
    except Exception as error:
        found = f"{type(error).__name__}: {error}"
        yield examine(layer, "this layer", lambda: fail(found, INSTALL), INSTALL)


def _compose(words: Sequence[str]) -> tuple[TrainRoot | None, str]:
    """The configuration of train.py for `words`, every path absolute; or why a broken package prevents it."""
    try:
        from eagle3lab.config.check import CHECKS
        from eagle3lab.config.compose import compose_alone
        from eagle3lab.config.invocation import Invocation, named
    except ImportError as error:
        return None, str(error)
    cfg = compose_alone("train", words, CHECKS["train"])
    return named(cfg, Invocation(overrides=tuple(words))), ""


def _packages() -> Iterator[Check]:
    from .packages import check_packages

    return check_packages()


def _symbols() -> Iterator[Check]:
    from .libraries import check_symbols

    return check_symbols()


def _machine(cfg: TrainRoot, quick: bool) -> Iterator[Check]:
    from .devices import check_devices, num_processes
    from .resources import check_resources

    yield from check_devices(cfg.hardware)
    disk_mib = QUICK_DISK_MIB if quick else DISK_MIB
    outputs = Path(cfg.outputs)
    yield from check_resources(outputs, num_processes=num_processes(cfg.hardware), disk_mib=disk_mib)


def _verifier(cfg: TrainRoot) -> Iterator[Check]:
    from .verifier import check_verifier

    return check_verifier(cfg.model, cfg.data)


def _store(cfg: TrainRoot, words: Sequence[str]) -> Iterator[Check]:
    from eagle3lab.config.invocation import extract_command

    from .store import check_store
    from .verifier import verifier_path

    command = " ".join([extract_command(words), *(shlex.quote(w) for w in words if w.startswith("store="))])
    return check_store(Path(str(cfg.store)), cfg.model, verifier_path(cfg.model), extract_command=command)


def _miniature(cfg: TrainRoot) -> Iterator[Check]:
    from eagle3lab.config.check import CHECKS
    from eagle3lab.config.compose import compose_alone

    from .devices import accelerator_here
    from .miniature import CHOICES, check_miniature

    return check_miniature(compose_alone("train", CHOICES, CHECKS["train"]), accelerator_here(cfg.hardware))
