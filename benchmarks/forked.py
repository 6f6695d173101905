"""Commands of a user, each in a process forked from one that has imported what they import."""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT


class CommandFailed(Exception):
    """A command, or a comparison, did not do what it should."""


def in_child(log: Path, work: Callable[[], Any]) -> None:
    """Run `work` in a forked process whose output goes to `log`; raises `CommandFailed` with its last lines."""
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            with log.open("w") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                work()
                code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status):
        lines = [line for line in log.read_text().splitlines() if line.strip()]
        raise CommandFailed(f"{log.stem}: {' / '.join(lines[-4:])}"[-900:])


def command(name: str, log: Path, *arguments: str) -> None:
    """`python NAME.py ARGUMENTS`"""

    def run() -> None:
        os.chdir(log.parent)
        sys.argv = [f"{name}.py", *arguments]
        print("python", *sys.argv)
        runpy.run_path(str(ROOT / f"{name}.py"), run_name="__main__")

    in_child(log, run)
