"""What a run says to type, to go on with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.config.invocation import Invocation, extract_command
from eagle3lab.config.words import command_line

from .option_files import composed


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
    monkeypatch.setenv("GROUP_WORLD_SIZE", "1")
    command = Invocation(overrides=("run_dir=old",)).resume_command(Path("/r"))
    assert command == "torchrun --nnodes 1 --nproc_per_node 8 train.py run_dir=/r resume=true"
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "node0")
    monkeypatch.setenv("MASTER_PORT", "29400")
    command = Invocation().resume_command(Path("/r"))
    assert "--rdzv_id none --rdzv_backend c10d --rdzv_endpoint node0:29400 train.py run_dir=/r" in command


def test_a_task_of_slurm_is_started_by_srun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.setenv("SLURM_NTASKS", "16")
    command = Invocation().resume_command(Path("/r"))
    assert command == "srun --kill-on-bad-exit=1 python train.py run_dir=/r resume=true"


def test_a_training_command_names_the_extraction_that_writes_its_store() -> None:
    words = ["model=tiny", "data.max_len=9", "draft.ttt_steps=2", "hardware=cpu", "store=x"]
    assert extract_command(words) == "python extract.py model=tiny data.max_len=9 hardware=cpu"
    shared, alone = ["experiment=kimi_k25_blackwell8", "optim.lr=1e-3"], ["experiment=nemo", "model=tiny"]
    assert extract_command(shared) == "python extract.py experiment=kimi_k25_blackwell8"
    assert extract_command(alone) == "python extract.py model=tiny"
    assert extract_command(["data.paths=[my chat.jsonl]"]) == "python extract.py 'data.paths=[my chat.jsonl]'"


def test_an_experiment_is_a_choice_of_that_name_for_either_command() -> None:
    for entry in ("train", "extract"):
        for words, chosen in (([], None), (["experiment=kimi_k25_blackwell8"], "kimi_k25_blackwell8")):
            config = composed(entry, command_line(entry, words)).hydra
            choices = Invocation.of(config, 0).choices
            assert {k: v for k, v in choices.items() if k.startswith("experiment")}["experiment"] == chosen
