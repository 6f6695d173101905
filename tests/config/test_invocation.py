"""What a run says to type, to go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.config.invocation import Invocation


def test_the_command_to_resume_keeps_every_choice_and_names_the_directory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    job = Invocation(
        overrides=("model=tiny", "data.paths=[a b.jsonl]", "outputs=here", "+x=1", "resume=false")
    )
    command = job.resume_command(Path("/runs/my run"))
    assert command == (
        "python train.py model=tiny 'data.paths=[a b.jsonl]' +x=1 'run_dir=/runs/my run' resume=true"
    )


def test_under_torchrun_it_starts_with_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    command = Invocation(overrides=("run_dir=old",)).resume_command(Path("/r"))
    assert command == "torchrun --nnodes 2 --nproc_per_node 8 train.py run_dir=/r resume=true"
