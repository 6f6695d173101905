"""All ranks of one command agree on its stamp; two commands never do."""

from __future__ import annotations

import pytest

from eagle3lab.config.stamp import STAMP_VARIABLE, is_rank_zero, run_stamp

LAUNCHERS = (
    "SLURM_JOB_ID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURM_JOB_NAME",
    "TORCHELASTIC_RUN_ID",
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
)


@pytest.fixture(autouse=True)
def _bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (STAMP_VARIABLE, "SLURM_PROCID", *LAUNCHERS):
        monkeypatch.delenv(name, raising=False)


def test_a_child_inherits_the_stamp(monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = run_stamp()
    assert run_stamp() == stamp
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run_stamp() == stamp


def test_a_requeued_job_finds_its_directory_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4242")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    first = run_stamp()
    monkeypatch.delenv(STAMP_VARIABLE)
    assert run_stamp() == first == "slurm-4242"


def test_array_tasks_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = set()
    for task in ("0", "1"):
        for name, value in (
            ("SLURM_JOB_ID", "9"),
            ("SLURM_ARRAY_JOB_ID", "7"),
            ("SLURM_ARRAY_TASK_ID", task),
        ):
            monkeypatch.setenv(name, value)
        monkeypatch.delenv(STAMP_VARIABLE, raising=False)
        stamps.add(run_stamp())
    assert stamps == {"slurm-7_0", "slurm-7_1"}


@pytest.mark.parametrize(
    ("variable", "value", "stamp"),
    [("SLURM_ARRAY_TASK_ID", "3", "slurm-9_3"), ("SLURM_ARRAY_JOB_ID", "7", "slurm-9")],
)
def test_half_of_an_arrays_variables_is_read_for_what_it_says(
    variable: str, value: str, stamp: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "9")
    monkeypatch.setenv(variable, value)
    assert run_stamp() == stamp


def test_an_interactive_allocation_is_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4243")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    monkeypatch.setenv("SLURM_PROCID", "3")
    assert not run_stamp().startswith("slurm")
    assert is_rank_zero()


def test_torchrun_ranks_share_their_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    first = run_stamp()
    monkeypatch.delenv(STAMP_VARIABLE)
    assert run_stamp() == first


@pytest.mark.parametrize(
    ("environment", "expected"),
    [({}, True), ({"RANK": "1"}, False), ({"RANK": "0"}, True), ({"LOCAL_RANK": "1"}, False),
     ({"LOCAL_RANK": "0", "NODE_RANK": "1"}, False), ({"SLURM_PROCID": "2"}, False),
     ({"RANK": "", "SLURM_PROCID": "2"}, False), ({"RANK": ""}, True)],
)  # fmt: skip
def test_one_process_is_rank_zero(
    environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert is_rank_zero() is expected
