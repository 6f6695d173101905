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
    if problem := _wrong_shape(text, key, value):
        return problem
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


def _wrong_shape(text: str, key: str, value: str | None) -> Problem | None:
    """A list, a text or a group of keys was expected, and another of them was given."""
    what, keys = f"{key} has the wrong type", f"keys of its own: {key}.NAME=VALUE"
    if found := re.search(r"(\w+) is not a ListConfig, list or tuple", text):
        scalar = value and not value.startswith("{")
        return Problem(what, value or found[1], "a list", f"{key}=[{value}]" if scalar else "")
    if found := re.search(r"Cannot convert '(\w+)' to string", text):
        return Problem(what, value or found[1], "a text")
    if found := re.search(r"(\w+) is not a subclass of (\w+)", text):
        return Problem(what, value or found[1], "a text" if found[2] == "str" else keys)
    if "Cannot merge DictConfig with ListConfig" in text:
        return Problem(what, value or "a list", keys)
    if "does not support deletion" in text:
        return Problem(f"{key} cannot be removed", expected=f"a value: {key}=VALUE")
    return None
