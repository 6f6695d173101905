"""Commands in processes that start with the heavy imports behind them: `COMMAND.py ARGS` without ten seconds of them.

Run as a script this is the server: it imports once, then forks for every request, and the fork becomes the command:
its own directory, environment, output and exit. What the order of imports decides is tested with real processes.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRELOADED = (
    "hydra", "wandb", "torch", "transformers", "lightning", "speculators.models.eagle3", "eagle3lab.cli",
    "eagle3lab.extract.pipeline", "eagle3lab.training.trainer", "eagle3lab.evaluate.run",
)  # fmt: skip


class WarmPython:
    """A server and the commands it runs, one after the other."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self, words: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout: float
    ) -> subprocess.CompletedProcess[str]:
        """As `subprocess.run([sys.executable, *words])` with its output captured; words: a script and its arguments."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with tempfile.TemporaryDirectory() as scratch:
            files = [os.path.join(scratch, name) for name in ("stdout", "stderr")]
            request = {"words": list(words), "cwd": str(cwd), "env": dict(env), "files": files}
            self._server.stdin.write(json.dumps(request) + "\n")
            self._server.stdin.flush()
            answered, _, _ = select.select([self._server.stdout], [], [], timeout)
            if not answered:
                self.close()
                raise subprocess.TimeoutExpired(list(words), timeout)
            code = int(self._server.stdout.readline())
            stdout, stderr = (Path(file).read_text(errors="replace") for file in files)
        return subprocess.CompletedProcess(list(words), code, stdout, stderr)

    def close(self) -> None:
        self._server.kill()
        self._server.wait()


def _serve() -> list[str] | None:
    """Answer requests with exit codes; returns a command's words in the fork that is to become it, at the end None."""
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            os.chdir(request["cwd"])
            os.environ.clear()
            os.environ.update(request["env"])
            _become(request["files"])
            return list(request["words"])
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    return None


def _become(files: Sequence[str]) -> None:
    for number, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    command = _serve()
    if command is not None:
        sys.argv = command
        sys.path[0] = str(Path(command[0]).parent)
        runpy.run_path(command[0], run_name="__main__")
