"""The doctor's findings for people and for machines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .check import Check, Status, exit_code

_MARKS = {Status.ok: "ok  ", Status.warn: "warn", Status.fail: "FAIL"}
_INDENT = " " * 8


def describe(check: Check) -> str:
    """One check: its first line, the rest of what was found, and the remedy where one is needed."""
    first, *rest = check.found.splitlines() or [""]
    lines = [f"  {_MARKS[check.status]}  {check.name:<22} {first}", *(f"{_INDENT}{line}" for line in rest)]
    if check.status is not Status.ok:
        lines += [f"{_INDENT}remedy: {line}" for line in check.remedy.splitlines()]
    return "\n".join(lines)


def summarise(checks: Sequence[Check], seconds: float) -> str:
    """The last line: how many checks, of which severity, and the exit code that follows."""
    count = {status: sum(check.status is status for check in checks) for status in Status}
    code = exit_code(list(checks))
    return (
        f"{len(checks)} checks in {seconds:.1f} s: {count[Status.ok]} ok, {count[Status.warn]} warn, "
        f"{count[Status.fail]} fail; exit code {code}"
    )


def as_json(checks: Sequence[Check], seconds: float, version: str) -> str:
    """All findings as one JSON object; `status` is the worst of them."""
    worst = next(
        (status for status in (Status.fail, Status.warn) if any(c.status is status for c in checks)),
        Status.ok,
    )
    content: dict[str, Any] = {
        "eagle3lab": version,
        "status": worst.value,
        "exit_code": exit_code(list(checks)),
        "seconds": round(seconds, 3),
        "checks": [
            {
                "layer": check.layer,
                "name": check.name,
                "status": check.status.value,
                "found": check.found,
                "remedy": check.remedy,
                "seconds": round(check.seconds, 3),
            }
            for check in checks
        ],
    }
    return json.dumps(content, indent=2)
