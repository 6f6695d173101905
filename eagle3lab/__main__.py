"""`python -m eagle3lab COMMAND ...`: the side doors of the three commands, each imported only when it is used."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from eagle3lab.config.errors import EXIT_USER_ERROR, UserError
from eagle3lab.config.places import usable_places

EXIT_BROKEN_PIPE = 141  # as a shell tells of SIGPIPE

# name -> (module, function taking the words after the name, what it is for)
COMMANDS: dict[str, tuple[str, str, str]] = {
    "store": (
        "eagle3lab.commands.store",
        "main",
        "look into a store, check it, join parts, import older files",
    ),
    "compare": ("eagle3lab.commands.compare", "main", "runs or sweeps: what differs, and what it changed"),
    "rerun": ("eagle3lab.commands.rerun", "main", "repeat a run from its own files, say what differs"),
    "doctor": ("eagle3lab.doctor.command", "main", "check machine, verifier and store before a run"),
}


def main(argv: Sequence[str]) -> int:
    """Run one command; returns the exit code. A user's mistake: one message, exit code 2."""
    listing = "\n".join(f"  {name:<10} {purpose}" for name, (_, _, purpose) in COMMANDS.items())
    parser = argparse.ArgumentParser(
        "python -m eagle3lab",
        epilog=f"commands:\n{listing}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", choices=sorted(COMMANDS), help="one of those below")
    parser.add_argument(
        "arguments", metavar="...", nargs=argparse.REMAINDER, help="its own words: COMMAND --help lists them"
    )
    chosen = parser.parse_args(list(argv))
    module, function, _ = COMMANDS[chosen.command]
    try:
        with usable_places():
            code = int(getattr(importlib.import_module(module), function)(chosen.arguments) or 0)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # whoever reads has seen enough, as `| head` has
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        return EXIT_BROKEN_PIPE
    except UserError as error:
        print(f"error: {error.render()}", file=sys.stderr)
        return EXIT_USER_ERROR


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
