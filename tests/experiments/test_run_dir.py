"""A run directory is claimed once, and files in it are whole or not there."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.experiments.run_dir import CONFIG, claim, read_json, write_json


def test_of_many_that_claim_a_directory_one_gets_it(tmp_path: Path) -> None:
    def attempt(_: int) -> bool:
        try:
            claim(tmp_path / "run", resume=False)
        except UserError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, range(32))) == 1


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        claim(tmp_path, resume=True)
    (tmp_path / CONFIG).write_text("x")
    claim(tmp_path, resume=True)


def test_json_refuses_what_is_no_json_and_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "summary.json"
    write_json(target, {"a": 1})
    with pytest.raises(ValueError, match="Out of range float"):
        write_json(target, {"a": float("nan")})
    assert read_json(target) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_an_unreadable_file_is_a_message(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="holds no JSON object"):
        read_json(tmp_path / "x.json")
    with pytest.raises(UserError, match="cannot read"):
        read_json(tmp_path / "missing.json")
