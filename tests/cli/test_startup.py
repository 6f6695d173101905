"""The command line is quick and torch-free until there is work to do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("script", ["train.py", "extract.py", "evaluate.py"])
def test_help_imports_neither_torch_nor_lightning(script: str) -> None:
    code = (
        f"import runpy, sys; sys.argv = ['{script}', '--help']\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'lightning', 'transformers', 'speculators', 'numpy'} & set(sys.modules)\n"
        "print('HEAVY', sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "HEAVY []" in done.stdout
    assert "hardware: auto" in done.stdout


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["train.py", "noise=unifrom0.05"], "noise=uniform0.05"),
        (["train.py", "+train.lerning_rate=1"], "unknown key train.lerning_rate"),
        (
            ["train.py", "hardware=blackwell8", "noise=uniform0.05"],
            "needs 8 CUDA devices on this node, visible here: 0",
        ),
        (["extract.py", "data=jsonl"], "data.paths is empty"),
    ],
)
def test_a_users_mistake_exits_with_2_and_no_traceback(command: list[str], says: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_users_own_command_plans_anywhere() -> None:
    command = [sys.executable, "train.py", "hardware=blackwell8", "noise=uniform0.05", "plan=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in ("memory per device", "tokens per update    16,384", "GB/s"):
        assert line in done.stdout


def test_what_libraries_tell_of_themselves_is_not_printed_as_hydras() -> None:
    code = (
        "import logging, sys; from eagle3lab.under_hydra import run_command\n"
        "def run(cfg, invocation):\n"
        "    logging.getLogger('library').info('hello')\n"
        "    logging.getLogger('library').warning('beware')\n"
        "sys.argv = ['train.py', 'model=tiny', 'hardware=cpu']\n"
        "run_command('train', run)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "hello" not in done.stdout + done.stderr
    assert "beware" in done.stdout + done.stderr
