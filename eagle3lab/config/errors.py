"""The one exception family for mistakes a user can mend, and the exit codes that go with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

EXIT_USER_ERROR = 2
EXIT_LOST = 1
EXIT_STOPPED = 143  # 128 + SIGTERM, as a shell reports it

# what reading a JSON file raises that is damaged, nested too deeply, or holds other things than expected
DAMAGED_JSON = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


@dataclass(frozen=True)
class Problem:
    """One mistake: what is wrong, the value found, what was expected, the override that mends it."""

    what: str
    value: object = None
    expected: str = ""
    fix: str = ""

    def __str__(self) -> str:
        text = self.what
        if self.value is not None:
            text += f": {self.value!r}"
        if self.expected:
            text += f"; expected {self.expected}"
        if self.fix:
            text += f"\n    try: {self.fix}"
        return text


class UserError(Exception):
    """A mistake of the user's. `cli` prints it without a traceback and exits with `exit_code`.

    Programming errors use `assert` or the builtin exceptions instead, and keep their traceback.
    """

    exit_code = EXIT_USER_ERROR
    told: bool | None = None  # by another process of the run; None: they have not met

    def __init__(self, *problems: Problem | str) -> None:
        self.problems: tuple[Problem, ...] = tuple(
            p if isinstance(p, Problem) else Problem(p) for p in problems
        )
        super().__init__(self.render())

    def render(self) -> str:
        """One message for all problems, each on its own line."""
        if len(self.problems) == 1:
            return str(self.problems[0])
        lines = [f"{len(self.problems)} problems:"]
        lines += [f"  {i}. {p}" for i, p in enumerate(self.problems, 1)]
        return "\n".join(lines)


class IntegrityError(UserError):
    """An artefact on disk is not what it says it is (checksum, identity, shape, alignment)."""


class StoppedBySignal(UserError):
    """Nobody's mistake: the run was told to end, saved what it had, and can go on from there."""

    exit_code = EXIT_STOPPED


class PeerLost(UserError):
    """Another process of the run failed or is no longer heard of; this one cannot go on without it."""

    exit_code = EXIT_LOST


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise every collected problem as one `UserError`; do nothing when there is none."""
    if problems:
        raise UserError(*problems)
