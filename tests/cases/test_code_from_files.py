"""SEC-02: code that comes with a tokenizer or a model runs only with model.trust_remote_code=true."""

from __future__ import annotations

import ast
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from eagle3lab.config.compose import config_directory
from eagle3lab.config.errors import EXIT_USER_ERROR
from eagle3lab.config.schema import ModelConfig

from ..warm import ROOT, WarmPython

CASE = Path(__file__).parent / "SEC-02"
RENAMED = {"data.path": "data.paths=[{}]", "model.tokenizer": "model.tokenizer={}"}
NEEDS_OWN_CODE = {"kimi_k2.yaml", "kimi_k25_int4.yaml"}  # its published tokenizer is Python code


def run(
    line: str, directory: Path, python: WarmPython, environment: dict[str, str]
) -> subprocess.CompletedProcess[str]:
    """One line of commands.txt in `directory`, its paths taken from the case."""
    marker, script, *words = shlex.split(line)
    name, _, value = marker.partition("=")
    mapped = ["model=local", "model.name=case", f"model.path={CASE.parent / '_shared' / 'target_tiny'}"]
    mapped += ["data=jsonl", "data.name=case", "hardware=cpu", f"store={directory / 'store'}"]
    for word in words:
        key, _, text = word.partition("=")
        mapped.append(RENAMED[key].format((CASE / text).resolve()) if key in RENAMED else word)
    return python.run(
        [str(ROOT / script), *mapped, "extract.num_render_workers=1"],
        cwd=directory,
        env={**environment, name: str(directory / value), "HF_HOME": str(directory / "cache")},
        timeout=300,
    )


@pytest.mark.parametrize("number", [0, 1], ids=["without_the_option", "with_it"])
def test_sec_02_code_of_a_tokenizer_runs_only_when_allowed(
    number: int, tmp_path: Path, warm_python: WarmPython, command_environment: dict[str, str]
) -> None:
    """A worker process renders here, so the option is not switched on for it either."""
    line = (CASE / "commands.txt").read_text().splitlines()[number]
    done = run(line, tmp_path, warm_python, command_environment)
    if number == 0:
        assert done.returncode == EXIT_USER_ERROR, done.stderr
        assert "model.trust_remote_code=true" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "marker.txt").exists()
        assert not (tmp_path / "store").exists()
    else:
        assert done.returncode == 0, done.stderr
        assert (tmp_path / "marker.txt").exists()
        assert "model.trust_remote_code=true: code that lies in" in done.stdout
        assert "tok_slow will be run" in done.stdout


def test_sec_02_no_group_switches_it_on_but_where_the_verifier_needs_it() -> None:
    on = {
        path.name
        for path in config_directory().rglob("*.yaml")
        if "trust_remote_code: true" in path.read_text() and yaml.safe_load(path.read_text())
    }
    assert on == NEEDS_OWN_CODE
    assert ModelConfig().trust_remote_code is False


def test_sec_02_no_code_path_switches_it_on() -> None:
    """Neither a loader, a helper process, an engine nor the export passes a constant True."""
    for path in sorted((ROOT / "eagle3lab").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert not (isinstance(node.value, ast.Constant) and node.value.value), (
                    f"{path}:{node.value.lineno}"
                )
