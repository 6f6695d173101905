"""A value of the configuration as text."""

from __future__ import annotations

from typing import Any


def as_typed(value: Any) -> str:
    """As it is typed on the command line, every digit kept: two values that differ are two texts."""
    if isinstance(value, list):
        return f"[{','.join(map(as_typed, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
