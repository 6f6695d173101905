"""A trial keeps its failure to itself, is skipped when it is finished, and belongs to one process."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir

from eagle3lab.config import compose
from eagle3lab.config.errors import IntegrityError, Problem, StoppedBySignal, UserError
from eagle3lab.config.invocation import Invocation
from eagle3lab.experiments import sweep_trial
from eagle3lab.experiments.run_dir import read_json, write_json
from eagle3lab.experiments.run_results import read_results
from eagle3lab.experiments.sweep_end import end_sweep
from eagle3lab.experiments.sweep_files import held, read_trial, record_file, write_index
from eagle3lab.experiments.sweep_start import SweepRefused, SweepStart

ABOUT = {"name": "noise", "entry": "extract", "continue": "python extract.py", "script": "extract.py"}


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep_trial, "_told_to_stop", False)


def trial(sweep_dir: Path, number: int, result: Any, *overrides: str) -> float | None:
    """Run trial `number`, whose command returns `result` or raises it."""

    def run(cfg: Any, invocation: Invocation) -> float | None:
        if isinstance(result, BaseException):
            raise result
        return result

    invocation = Invocation(overrides=overrides or (f"a={number}",), sweep_dir=sweep_dir, job_num=number)
    return sweep_trial.run_trial(object, run, invocation, lambda _: False)


def states(sweep_dir: Path) -> list[str]:
    return [t["state"] for t in read_json(sweep_dir / "sweep.json")["trials"]]


def test_a_failed_trial_is_recorded_and_returns_nothing(tmp_path: Path, capsys: Any) -> None:
    write_index(tmp_path, ABOUT, [["a=0"], ["a=1"], ["a=2"]])
    values = [
        trial(tmp_path, 0, 0.5),
        trial(tmp_path, 1, RuntimeError("broken on purpose")),
        trial(tmp_path, 2, 0.7),
    ]
    assert values == [0.5, None, 0.7]
    assert end_sweep(tmp_path) == 1
    assert states(tmp_path) == ["finished", "failed", "finished"]
    failed = read_json(tmp_path / "sweep.json")["trials"][1]
    assert failed["error"] == "RuntimeError: broken on purpose"
    assert "Traceback" in (tmp_path / failed["log"]).read_text()
    assert "2 of 3 trials finished, 1 failed" in capsys.readouterr().out


def test_a_finished_trial_is_not_run_again_and_returns_its_value(tmp_path: Path) -> None:
    value = 1.0012771392081736
    assert trial(tmp_path, 0, value) == value
    assert trial(tmp_path, 0, AssertionError("ran again")) == value


def test_a_failed_trial_is_tried_again(tmp_path: Path) -> None:
    assert trial(tmp_path, 0, UserError("no room")) is None
    assert trial(tmp_path, 0, 0.25) == 0.25
    assert read_trial(tmp_path, 0).error == ""  # type: ignore[union-attr]


def test_the_number_of_a_trial_stands_for_its_overrides(tmp_path: Path) -> None:
    trial(tmp_path, 0, 0.5, "noise=none", "hardware=cpu")
    assert trial(tmp_path, 0, 0.9, "noise=none", "hardware=h200") == 0.5  # how it computes is not what it is
    with pytest.raises(SweepRefused, match="trial 0 of this directory was another one"):
        trial(tmp_path, 0, 0.9, "noise=uniform0.05")
    assert read_trial(tmp_path, 0).value == 0.5  # type: ignore[union-attr]


def test_after_a_signal_no_further_trial_begins(tmp_path: Path) -> None:
    write_index(tmp_path, ABOUT, [["a=0"], ["a=1"]])
    assert trial(tmp_path, 0, StoppedBySignal(Problem("stopped by SIGTERM"))) is None
    assert trial(tmp_path, 1, AssertionError("began")) is None
    assert end_sweep(tmp_path) == 143
    assert states(tmp_path) == ["stopped", "waiting"]


def test_ctrl_c_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        trial(tmp_path, 0, KeyboardInterrupt())
    assert read_trial(tmp_path, 0).state == "stopped"  # type: ignore[union-attr]


def test_a_trial_belongs_to_one_process_until_that_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from eagle3lab.experiments.sweep_files import held\n"
        "with held(Path(sys.argv[1]), 0):\n    print('held', flush=True); time.sleep(60)"
    )
    other = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    assert trial(tmp_path, 0, 0.5) is None
    assert "another process is running trial 0" in read_trial(tmp_path, 0).error  # type: ignore[union-attr]
    other.kill()
    other.wait()
    with held(tmp_path, 0):
        pass


def test_a_value_that_is_no_number_is_no_value(tmp_path: Path) -> None:
    assert math.isnan(trial(tmp_path, 0, math.nan) or 0.0)
    assert read_trial(tmp_path, 0).value is None  # type: ignore[union-attr]


def test_a_damaged_record_is_said_and_not_used(tmp_path: Path) -> None:
    trial(tmp_path, 0, 0.5)
    path = record_file(tmp_path, 0)
    write_json(path, {**read_json(path), "state": "done"})
    with pytest.raises(IntegrityError, match="'done'; expected one of finished"):
        read_trial(tmp_path, 0)
    with pytest.raises(SweepRefused, match="'done'"):
        trial(tmp_path, 0, 0.5)


def test_trials_that_never_began_are_named_in_a_comparison(tmp_path: Path) -> None:
    write_index(tmp_path, {**ABOUT, "entry": "train"}, [["a=0"], ["a=1"]])
    results = read_results([tmp_path])
    assert [r.state for r in results] == ["unfinished", "unfinished"]
    assert [r.overrides for r in results] == [("a=0",), ("a=1",)]


def test_records_are_plain_data(tmp_path: Path) -> None:
    trial(tmp_path, 3, 0.5)
    record = read_trial(tmp_path, 3)
    assert record is not None
    assert set(read_json(record_file(tmp_path, 3))) == {f.name for f in dataclasses.fields(record)}


def test_a_sweep_without_its_store_claims_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prepare(_trials: object) -> None:
        raise UserError("no store")

    monkeypatch.setitem(sys.modules, "stores", SimpleNamespace(prepare=prepare))
    compose.register()
    monkeypatch.chdir(tmp_path)
    words = ["hardware=cpu", "store=nowhere", "hydra.sweep.dir=claimed"]
    with initialize_config_dir(str(compose.config_directory()), version_base="1.3"):
        config = hydra_compose(
            "train",
            [*words, "hydra.mode=MULTIRUN", f"hydra.runtime.cwd={tmp_path}"],
            return_hydra_config=True,
        )
        with pytest.raises(SweepRefused) as refused:
            SweepStart("stores:prepare").on_multirun_start(config)
    assert "no store" in str(refused.value)
    assert "to go on" not in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
