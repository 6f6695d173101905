"""What a kill or a full disk leaves of `metrics.csv`, when the run goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.config.errors import IntegrityError
from eagle3lab.training.csv_log import CsvLog


def test_a_last_line_that_was_cut_is_no_row(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("update,loss\r\n9,2.5\r\n1")  # of update 10
    CsvLog(path, ["update", "loss"], keep_until=9).log_metrics({"update": 10, "loss": 2.0})
    assert path.read_text().split() == ["update,loss", "9,2.5", "10,2.0"]


@pytest.mark.parametrize("line", ["\0\0,1.0", "2", "2,1.0,7", "x,1.0"])
def test_a_damaged_line_is_named_and_the_file_left_alone(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text(f"update,loss\n1,2.5\n{line}\n3,2.0\n")
    before = path.read_bytes()
    with pytest.raises(IntegrityError, match=r"line 3 of .*metrics\.csv is damaged"):
        CsvLog(path, ["update", "loss"], keep_until=3)
    assert path.read_bytes() == before
