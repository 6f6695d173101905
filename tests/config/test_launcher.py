"""What a launcher left in the environment: no numbers, or numbers that contradict each other, are told."""

from __future__ import annotations

import pytest

from eagle3lab.config.launcher import launcher_problems
from eagle3lab.config.stamp import is_rank_zero, local_rank

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "MASTER_PORT",
    "GROUP_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NTASKS_PER_NODE", "SLURM_NODEID",
    "SLURM_JOB_NAME")  # fmt: skip


@pytest.fixture
def problems_in(monkeypatch: pytest.MonkeyPatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def problems(words: str) -> str:
        for word in words.split():
            monkeypatch.setenv(*word.split("="))
        return "\n".join(map(str, launcher_problems()))

    return problems


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("RANK=a", "RANK in the environment: 'a'; expected a whole number"),
        ("LOCAL_RANK=-1 WORLD_SIZE=2", "LOCAL_RANK in the environment: '-1'"),
        ("SLURM_PROCID=1.0", "SLURM_PROCID in the environment: '1.0'"),
        ("RANK=0 WORLD_SIZE=1 MASTER_PORT=auto", "MASTER_PORT in the environment: 'auto'"),
        ("RANK=2 WORLD_SIZE=2", "RANK in the environment: 2; expected below WORLD_SIZE=2"),
        ("RANK=1 WORLD_SIZE=0", "expected below WORLD_SIZE=0"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_RANK=1", "LOCAL_RANK in the environment: 1; expected at most RANK=0"),
        ("WORLD_SIZE=2 LOCAL_WORLD_SIZE=4", "expected at most WORLD_SIZE=2"),
        ("SLURM_PROCID=4 SLURM_NTASKS=4", "expected below SLURM_NTASKS=4"),
        ("RANK=1", "expected WORLD_SIZE beside it"),
    ],
)
def test_variables_that_cannot_be_a_launchers_are_told(words: str, said: str, problems_in) -> None:
    found = problems_in(words)
    assert said in found
    assert "unset " in found
    assert found.count("in the environment") == 1
    is_rank_zero(), local_rank()  # the message itself is printed by the first process


@pytest.mark.parametrize(
    "words",
    [
        "",
        "RANK= WORLD_SIZE=",
        "RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=2 MASTER_PORT=29400",
        "LOCAL_RANK=1 WORLD_SIZE=2 NODE_RANK=0 MASTER_PORT=1234",  # Lightning's own
        "SLURM_PROCID=1 SLURM_NTASKS=2 SLURM_LOCALID=0 SLURM_NTASKS_PER_NODE=1",
        "SLURM_PROCID=7 SLURM_NTASKS=1 SLURM_JOB_NAME=interactive",  # a shell's, which nobody reads
    ],
)
def test_what_launchers_really_write_is_no_problem(words: str, problems_in) -> None:
    assert problems_in(words) == ""
