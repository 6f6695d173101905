"""A run directory is claimed once, and files in it are whole or not there."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.invocation import Invocation
from eagle3lab.config.schema import TrainRoot
from eagle3lab.experiments import lifecycle
from eagle3lab.experiments.run_dir import (
    CONFIG,
    METRICS,
    PROVENANCE,
    claim,
    only_run_in,
    read_json,
    write_json,
)
from eagle3lab.store.manifest import Manifest, VerifierIdentity


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        verifier=VerifierIdentity("LlamaForCausalLM", "0" * 64, "1" * 64, 8, 4, 16, "tiny"),
        tokenizer_hash="t",
        template_hash="t",
        template_args_hash="t",
        layer_ids=(1, 2),
        dtype="bfloat16",
        engine={"name": "test"},
    )


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


def test_one_process_at_a_time_goes_on_in_a_directory(tmp_path: Path) -> None:
    with (
        only_run_in(tmp_path),
        pytest.raises(UserError, match="another process is training"),
        only_run_in(tmp_path),
    ):
        pass
    with only_run_in(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_at_the_start_names_the_outputs_and_leaves_the_directory_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, manifest: Manifest
) -> None:
    def full(path: Path, content: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lifecycle, "write_json", full)
    with (
        pytest.raises(UserError, match="outputs=DIRECTORY"),
        lifecycle.begun_run(TrainRoot(), Invocation(), tmp_path, manifest),
    ):
        pass
    claim(tmp_path, resume=False)


def test_a_refused_run_leaves_nothing_and_a_trained_one_everything(
    tmp_path: Path, manifest: Manifest
) -> None:
    run_dir = tmp_path / "new" / "run"

    def run(*lines: str) -> None:
        with lifecycle.begun_run(TrainRoot(), Invocation(), run_dir, manifest):
            (run_dir / METRICS).write_text("".join(f"{line}\n" for line in lines))
            raise UserError("refused")

    with pytest.raises(UserError, match="refused"):
        run("update,loss")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match="refused"):
        run("update,loss", "1,2.5")
    with pytest.raises(UserError, match="the run directory is taken"):
        run()
    assert {file.name for file in run_dir.iterdir()} == {CONFIG, PROVENANCE, METRICS}


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
