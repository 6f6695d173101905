"""What one check found, and how a check that raises becomes a finding. Standard library only."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from eagle3lab.config.errors import UserError

INSTALL = "python -m pip install -e . (or VENV=.venv scripts/setup_env.sh)"


class Status(Enum):
    ok = "ok"
    warn = "warn"  # a run works, but not as it could
    fail = "fail"  # a run would stop, or be wrong


@dataclass(frozen=True)
class Check:
    """One check's finding. What is not ok always names a remedy."""

    layer: str
    name: str
    status: Status
    found: str
    remedy: str = ""
    seconds: float = 0.0

    def __post_init__(self) -> None:
        assert self.status is Status.ok or self.remedy, f"{self.name} names no remedy"


@dataclass(frozen=True)
class Finding:
    """What a check function returns when there is more to say than that all is well."""

    status: Status
    found: str
    remedy: str = ""


def warn(found: str, remedy: str) -> Finding:
    return Finding(Status.warn, found, remedy)


def fail(found: str, remedy: str) -> Finding:
    return Finding(Status.fail, found, remedy)


def examine(layer: str, name: str, look: Callable[[], str | Finding], remedy: str) -> Check:
    """Run `look`. Whatever it raises is a failure; `remedy` stands in where the error names none."""
    start = time.perf_counter()
    try:
        finding = look()
        if isinstance(finding, str):
            finding = Finding(Status.ok, finding)
    except UserError as error:
        finding = _from_problems(error, remedy)
    except Exception as error:  # a check must never end the doctor
        first = (str(error).strip().splitlines() or [""])[0]
        finding = fail(f"{type(error).__name__}: {first}", remedy)
    check = Check(layer, name, finding.status, finding.found, finding.remedy)
    return replace(check, seconds=time.perf_counter() - start)


def _from_problems(error: UserError, remedy: str) -> Finding:
    found = [str(replace(problem, fix="")) for problem in error.problems]
    fixes = list(dict.fromkeys(problem.fix for problem in error.problems if problem.fix))
    return fail("\n".join(found), "\n".join(fixes) or remedy)


def exit_code(checks: list[Check]) -> int:
    """0 when nothing failed (warnings included), 2 when something did."""
    return 2 if any(check.status is Status.fail for check in checks) else 0
