from __future__ import annotations

import sys
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.verifier import download

# Stands in for `python -m pip`: grows a file in its temporary directory, then moves it, as pip does.
SLOW_PIP = f"""#!{sys.executable}
import os, pathlib, sys, time
part = pathlib.Path(os.environ["TMPDIR"]) / "pip-unpack-x" / "part.whl"
part.parent.mkdir()
for i in range(1, 9):
    part.write_bytes(b"x" * i * 500_000)
    time.sleep(0.15)
if os.environ.get("FAIL"):
    print("ERROR: disk on fire")
    sys.exit(1)
part.rename(pathlib.Path(sys.argv[sys.argv.index("--dest") + 1]) / "thing-1.0-py3-none-any.whl")
"""


def fetch(directory: Path, **kwargs: bool) -> Path:
    return download.pip_download(
        "thing",
        "1.0",
        "thing-1.0-py3-none-any.whl",
        num_bytes=4_000_000,
        directory=directory,
        what="The thing",
        variable="THING_WHEEL",
        **kwargs,
    )


@pytest.fixture(autouse=True)
def slow_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "python"
    script.write_text(SLOW_PIP)
    script.chmod(0o755)
    monkeypatch.setattr(download.sys, "executable", str(script))
    monkeypatch.setattr(download, "_LINE_SECONDS", 0.3)


@pytest.fixture
def work(tmp_path: Path) -> Path:
    directory = tmp_path / "work"
    directory.mkdir()
    return directory


def test_plain_lines_outside_a_terminal(work: Path, capsys: pytest.CaptureFixture) -> None:
    assert fetch(work).stat().st_size == 4_000_000
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "fetching The thing (thing 1.0, 4.0 MB)"
    assert "fetched in" in lines[-1]
    assert any(" of 4.0 MB, " in line and " s left" in line for line in lines[1:-1])


def test_a_bar_on_a_terminal(
    work: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    fetch(work)
    assert "4.0/4.0" in capsys.readouterr().err


def test_quiet_says_nothing(work: Path, capsys: pytest.CaptureFixture) -> None:
    fetch(work, quiet=True)
    assert capsys.readouterr().err == ""


def test_last_error_of_pip_is_quoted(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "1")
    with pytest.raises(UserError, match=r"disk on fire.*\n.*THING_WHEEL=/path/to/thing-1\.0"):
        fetch(work, quiet=True)
