"""What torchrun, SLURM or Lightning left in the environment, held against itself before anything relies on it."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .errors import Problem
from .stamp import interactive_slurm

# a process's number -> how many there are
_NUMBERED = {
    "RANK": "WORLD_SIZE",
    "LOCAL_RANK": "LOCAL_WORLD_SIZE",
    "GROUP_RANK": "GROUP_WORLD_SIZE",
    "SLURM_PROCID": "SLURM_NTASKS",
}
_WITHIN = (("LOCAL_RANK", "RANK"), ("LOCAL_WORLD_SIZE", "WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_PROCID"))
_OTHERS = ("NODE_RANK", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID", "MASTER_PORT")


def launcher_problems() -> Iterator[Problem]:
    """Variables that are no numbers, and numbers that contradict each other."""
    names = [*_NUMBERED, *_NUMBERED.values(), *_OTHERS]
    given = {name: value for name in names if (value := os.environ.get(name, "").strip())}
    if interactive_slurm():
        given = {name: value for name, value in given.items() if not name.startswith("SLURM_")}
    numbers = {name: int(value) for name, value in given.items() if value.isascii() and value.isdigit()}
    for name, value in given.items():
        if name not in numbers:
            yield _problem(name, value, "a whole number, as a launcher writes it", name)
    for name, total in _NUMBERED.items():
        if name in numbers and total in numbers and numbers[name] >= numbers[total]:
            expected = f"below {total}={numbers[total]}"
            yield _problem(name, numbers[name], expected, name, total)
    for name, whole in _WITHIN:
        if name in numbers and whole in numbers and numbers[name] > numbers[whole]:
            yield _problem(name, numbers[name], f"at most {whole}={numbers[whole]}", name, whole)
    for name in ("RANK", "LOCAL_RANK"):  # the first process writes what a run gives: here it would not exist
        if numbers.get(name, 0) > 0 and "WORLD_SIZE" not in given:
            yield _problem(name, numbers[name], "WORLD_SIZE beside it", name)


def _problem(name: str, value: object, expected: str, *names: str) -> Problem:
    fix = f"torchrun, which sets them; or without a launcher: unset {' '.join(names)}"
    return Problem(f"{name} in the environment", value, expected, fix)
