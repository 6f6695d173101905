"""CFG and LOG cases of several runs: sweeps with a failing trial, their W&B runs, runs that start together."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from case_run import expected

from eagle3lab.config.errors import EXIT_STOPPED, EXIT_USER_ERROR
from eagle3lab.experiments import sweep_start, sweep_trial
from eagle3lab.experiments.compare_runs import compare_runs
from eagle3lab.experiments.sweep_end import EXIT_FAILED_TRIAL
from eagle3lab.training import module as training_module
from eagle3lab.training import trainer

from ..experiments.wandb_files import OfflineRun, read_runs
from ..warm import ROOT, WarmPython

CASES = Path(__file__).parent
Command = Callable[..., Any]
QUICK = (
    "data.validation_share=0", "train.self_test=false", "train.seq_len=64", "optim.lr_warmup_updates=0",
    "train.log_every_updates=1",
)  # fmt: skip


@pytest.fixture
def sweep(
    extract_command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., tuple[Any, Path]]:
    """`train.py WORDS -m` over the rows of CKP-01: what it said, and the sweep's directory."""
    extract_command("CKP-01", QUICK[0])

    def run(*words: str, expect: int = 0) -> tuple[Any, Path]:
        monkeypatch.setattr(sweep_start, "begun", None)
        monkeypatch.setattr(sweep_trial, "_told_to_stop", False)
        directory = tmp_path / "sweep"
        more = (*QUICK, *words, f"hydra.sweep.dir={directory}", "-m")
        return extract_command("CKP-01", *more, entry="train", expect=expect), directory

    return run


def test_cfg_08_a_failed_trial_is_told_and_stops_no_other(
    sweep: Callable[..., tuple[Any, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = expected("CFG-08")
    spec = importlib.util.spec_from_file_location("fail_on_two", CASES / "CFG-08" / "fail_on_two.py")
    assert spec is not None
    assert spec.loader is not None
    stub = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(stub)
    seeds, fit = [], trainer.fit

    def failing(*args: Any, train: Any, **others: Any) -> Any:
        seeds.append(train.seed)
        stub.main(train.seed)
        return fit(*args, train=train, **others)

    monkeypatch.setattr(trainer, "fit", failing)
    words = ("train.seed=1,2,3", "train.max_updates=1", "logger=wandb_offline")
    done, directory = sweep(*words, expect=EXIT_FAILED_TRIAL)
    assert seeds == case["jobs_run"]
    trials = json.loads((directory / "sweep.json").read_text())["trials"]
    assert [t["state"] for t in trials] == ["finished", "failed", "finished"]
    assert trials[1]["error"] == "RuntimeError: seed 2 is broken on purpose"
    assert "seed 2 is broken on purpose" in (directory / trials[1]["log"]).read_text()
    assert f"failed: {trials[1]['error']}\n  log {directory / trials[1]['log']}" in done.err
    assert [run.exit_code for run in read_runs(directory)] == [0, 1, 0]  # finished, failed, finished

    # the table: three runs, the figures of the finished ones, none for the failed one
    runs = {run.config.seeds["train.seed"]: run for run in compare_runs([directory]).runs}
    assert {seed: run.state for seed, run in runs.items()} == {1: "finished", 2: "failed", 3: "finished"}
    assert dict(runs[2].figures) == {}
    assert "RuntimeError: seed 2 is broken on purpose" in runs[2].reason
    assert "failed" in done.out
    assert "2 of 3" in done.out


def test_log_01_every_trial_of_a_sweep_is_a_wandb_run_of_its_own(
    sweep: Callable[..., tuple[Any, Path]],
) -> None:
    case = expected("LOG-01")
    _, directory = sweep("optim.lr=1e-3,1e-4,1e-5", "train.max_updates=2", "logger=wandb_offline")
    runs = read_runs(directory)
    assert len(runs) == case["offline_run_directories"]
    assert len({run.run_id for run in runs}) == case["run_ids"]
    assert [run.config["optim"]["lr"] for run in runs] == case["config_lr"]
    assert {run.group for run in runs} == {directory.name}
    for run in runs:
        assert (run.job_type, run.exit_code) == ("train", 0)
        assert run.config["draft"]["ttt_steps"] == 3  # nested plain data
        assert run.config["provenance"]["overrides"]
        assert {"model:local+changed", "optim:adamw+changed", "loss:kl"} <= set(run.tags)
        assert [point["update"] for point in run.history] == [1, 2]
        assert run.axes == {"*": "tokens"}
        assert run.history[0]["tokens"] < run.history[1]["tokens"]
        assert run.summary["roofline"]["tokens_per_second"] > 0
        assert run.summary["selection"]["select_by"] == "simulated_acceptance"


class _Killed(BaseException):
    pass


@pytest.fixture
def tracked_run(extract_command: Command, tmp_path: Path) -> Callable[..., Any]:
    """`train.py` over the rows of CKP-01 with W&B offline, ten updates, saved every four."""
    extract_command("CKP-01", QUICK[0])
    words = (
        *QUICK[:2], "train.seq_len=24", *QUICK[3:], "logger=wandb_offline", "train.save_every_updates=4",
        "train.max_updates=10", "train.max_epochs=null",
    )  # fmt: skip

    def train(*more: str, expect: int = 0) -> Any:
        return extract_command("CKP-01", *words, *more, entry="train", expect=expect)

    return train


@pytest.fixture
def at_update(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Do something once, before the update after the given number of them."""

    def arrange(number: int, action: Callable[[], None]) -> None:
        original = training_module.Eagle3Module.training_step
        left = [action]

        def step(self: Any, batch: Any, batch_idx: int) -> None:
            if self.num_updates == number and left:
                left.pop()()
            original(self, batch, batch_idx)

        monkeypatch.setattr(training_module.Eagle3Module, "training_step", step)

    return arrange


def test_log_02_a_resumed_run_has_one_point_per_update_under_its_own_id(
    tracked_run: Callable[..., Any], at_update: Callable[..., None], tmp_path: Path
) -> None:
    def killed() -> None:
        raise _Killed

    at_update(6, killed)
    with pytest.raises(_Killed):
        tracked_run(f"run_dir={tmp_path / 'run'}")
    (first,) = read_runs(tmp_path / "run")
    before = {path: path.read_bytes() for path in first.folder.glob("*.wandb")}
    assert [point["update"] for point in first.history] == [1, 2, 3, 4, 5, 6]
    done = tracked_run(f"run_dir={tmp_path / 'run'}", "resume=true")
    assert "4 of 10 updates made" in done.out
    runs = read_runs(tmp_path / "run")
    assert len(runs) == 2
    assert {run.run_id for run in runs} == {(tmp_path / "run" / "wandb_run_id").read_text().strip()}
    assert {path: path.read_bytes() for path in before} == before  # the first part is left as it was
    resumed = _last(runs)
    assert [point["update"] for point in resumed.history] == list(range(1, 11))
    tokens = [point["tokens"] for point in resumed.history]
    assert tokens == sorted(set(tokens))
    assert [point["train/loss"] for point in resumed.history[:6]] == pytest.approx(
        [point["train/loss"] for point in first.history]
    )
    assert resumed.axes == {"*": "tokens"}  # W&B's internal step is no axis


def _last(runs: list[OfflineRun]) -> OfflineRun:
    return max(runs, key=lambda run: run.folder.stat().st_mtime_ns)


def test_slm_01_a_requeued_job_goes_on_in_its_directory(
    tracked_run: Callable[..., Any],
    at_update: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first start is the case's environment without the count of restarts; the signal comes after update 4."""
    requeue = dict(line.split("=") for line in (CASES / "SLM-01" / "requeue.env").read_text().split())
    first = {key: value for key, value in requeue.items() if key != "SLURM_RESTART_COUNT"}

    def start(environment: dict[str, str], *more: str, expect: int = 0) -> Any:
        with monkeypatch.context() as patch:
            patch.delenv("EAGLE3LAB_STAMP", raising=False)
            for name, value in environment.items():
                patch.setenv(name, value)
            return tracked_run(*more, expect=expect)

    at_update(4, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    start(first, expect=EXIT_STOPPED)
    (run_dir,) = (tmp_path / "outputs").glob("*/slurm-4242")
    config, run_id = (run_dir / "config.yaml").read_text(), (run_dir / "wandb_run_id").read_text()
    done = start(requeue, "hardware.num_threads=1")
    assert f"directory          {run_dir}" in done.out
    assert "5 of 10 updates made" in done.out  # the update at hand was finished
    assert "resume: the stored configuration differs: +   num_threads: 1" in done.out
    assert (run_dir / "config.yaml").read_text() == config
    assert (run_dir / "wandb_run_id").read_text() == run_id
    assert json.loads((run_dir / "summary.json").read_text())["updates"] == 10
    assert [path.name for path in (tmp_path / "outputs").glob("*/*")] == ["slurm-4242"]
    start({**first, "SLURM_ARRAY_JOB_ID": "4242", "SLURM_ARRAY_TASK_ID": "7"}, "train.max_updates=1")
    assert len(list((tmp_path / "outputs").glob("*/slurm-4242_7"))) == 1


def _environment(case: str, name: str) -> dict[str, str]:
    given = dict(line.split("=") for line in (CASES / case / name).read_text().split())
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3LAB_", "HYDRA_", "SLURM_"))}
    return {**kept, **given, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def test_slm_02_one_task_for_two_devices_is_refused(
    tracked_run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for line in (CASES / "SLM-02" / "one_task.env").read_text().split():
        monkeypatch.setenv(*line.split("="))
    refused = tracked_run("hardware=cpu2", f"run_dir={tmp_path / 'run'}", expect=EXIT_USER_ERROR)
    assert "SLURM started another number of processes on this node than hardware has devices" in refused.err
    assert "1 processes, 2 devices" in refused.err
    assert not (tmp_path / "run").exists()


def test_cfg_09_slm_02_each_job_of_a_sweep_has_its_own_two_ranks_also_in_an_interactive_shell(
    extract_command: Command, tmp_path: Path, warm_python: WarmPython
) -> None:
    """Two jobs of two ranks, in the environment of a shell that SLURM gave for eight tasks."""
    case = expected("CFG-09")
    store = extract_command("CKP-01", QUICK[0]).store
    words = [
        "-m", "hardware=cpu2", "train.seed=1,2", "model=local", "model.name=case", "data=jsonl", "data.name=case",
        f"model.path={CASES / '_shared' / 'target_tiny'}",
        f"data.paths=[{CASES / 'CKP-01' / 'data.jsonl'}]", "model.aux_layer_ids=[2,4,5]", f"store={store}",
        "train.max_updates=1", "logger=wandb_offline", *QUICK,
    ]  # fmt: skip
    environment = _environment("SLM-02", "interactive.env")
    done = warm_python.run(
        [str(ROOT / "train.py"), *words], cwd=tmp_path / "store", env=environment, timeout=240
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    (directory,) = (tmp_path / "store" / "outputs" / "sweeps" / "train").iterdir()
    runs = sorted(p for p in directory.iterdir() if (p / "config.yaml").is_file())
    assert len(runs) == case["run_dirs"]
    configs = [yaml.safe_load((run / "config.yaml").read_text()) for run in runs]
    assert [config["train"]["seed"] for config in configs] == [1, 2]
    summaries = [json.loads((run / "summary.json").read_text()) for run in runs]
    assert [s["num_replicas"] for s in summaries] == [case["processes_per_job"]] * 2
    assert [s["updates"] for s in summaries] == [1, 1]
    assert len({run.run_id for run in read_runs(directory)}) == case["wandb_runs"]
    # started once each, and no rank swept by itself or made a directory
    assert done.stdout.count("Launching 2 jobs") == 1
    assert not [p.name for p in (tmp_path / "store").iterdir() if p.name in ("multirun", "hydra_plugins")]
    assert len(list((tmp_path / "store" / "outputs").iterdir())) == 1
    said = re.findall(r"processes +(world size 2, .*)", done.stdout)
    assert len(said) == 2
    assert (
        "started by this command (SLURM_JOB_NAME=bash is an interactive shell, which starts none)" in said[0]
    )


def test_cfg_03_two_runs_and_two_sweeps_in_one_second_share_no_directory(
    extract_command: Command, tmp_path: Path
) -> None:
    """The case's script twice at once: single runs, then what a sweep's directory would be."""
    case = expected("CFG-03")
    store = extract_command("CKP-01", QUICK[0]).store
    common = [
        "hardware=cpu", "model=local", "model.name=case", "data=jsonl", "data.name=case", f"store={store}",
        f"model.path={CASES / '_shared' / 'target_tiny'}",
        f"data.paths=[{CASES / 'CKP-01' / 'data.jsonl'}]", "model.aux_layer_ids=[2,4,5]", "train.max_updates=2",
        "run_name=same", *QUICK,
    ]  # fmt: skip
    script = (CASES / "CFG-03" / "start_two.sh").read_text()
    seeds = re.findall(r"train\.seed=\d", script)
    assert len(seeds) == case["directories"]
    work = tmp_path / "work"
    work.mkdir()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("EAGLE3LAB_", "HYDRA_"))}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    sweeps = ["--cfg", "hydra", "-p", "hydra.sweep", "--resolve"]
    started = [
        subprocess.Popen(
            [sys.executable, str(ROOT / "train.py"), *words, *common],
            cwd=work,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for words in ([seeds[0]], [seeds[1]], sweeps, sweeps)
    ]
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0, 0, 0], said
    runs = sorted((work / "outputs" / "same").iterdir())
    assert len(runs) == case["directories"]
    stored = [yaml.safe_load((run / "config.yaml").read_text())["train"]["seed"] for run in runs]
    assert sorted(stored) == [1, 2]
    for run in runs:
        assert (run / "checkpoints" / "last.ckpt").is_file()
        assert (run / "metrics.csv").is_file()
    places = {yaml.safe_load(text)["dir"] for text in said[2:]}
    assert len(places) == case["directories"]
    assert all(place.startswith("outputs/sweeps/train/") for place in places)
