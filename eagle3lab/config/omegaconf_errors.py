"""What OmegaConf says of a value, as one of our messages."""

from __future__ import annotations

import re

from .errors import Problem


def problem_of_value(text: str, value: str | None = None) -> Problem:
    """The problem that an OmegaConf message tells of; `value`: as it was typed, where that is known."""
    key_match = re.search(r"full_key: (\S+)", text)
    key = key_match.group(1) if key_match else "configuration"
    if "nterpolation" in text:
        return Problem(
            f"{key} holds ${{...}} that names no key",
            text.splitlines()[0],
            "${KEY} of the configuration; \\${...} for the text itself",
        )
    if "is not Optional" in text:
        return Problem(f"{key} cannot be null", expected="a value")
    line = next(
        (ln for ln in text.splitlines() if "Value " in ln or "Invalid value" in ln), text.splitlines()[0]
    )
    line = line.partition(": ")[2] if line.startswith("Error merging override") else line
    wanted = re.search(r"could not be converted to (\w+)|expected one of (\[.*\])|is not a valid (\w+)", line)
    kinds = {"Integer": "a whole number", "Float": "a number", "bool": "true or false"}
    if wanted:
        name = next(g for g in wanted.groups() if g)
        shown = re.search(r"[Vv]alue '?([^']*)'? ", line)
        return Problem(
            f"{key} has the wrong type", value or (shown.group(1) if shown else None), kinds.get(name, name)
        )
    return Problem(f"{key}: {line.strip()}")
