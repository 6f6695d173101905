"""Runs and sweeps by what training measured, on run directories that a test writes."""

from __future__ import annotations

import csv
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from eagle3lab.__main__ import main
from eagle3lab.config.errors import UserError
from eagle3lab.config.selection import SelectBy
from eagle3lab.experiments.compare_runs import RunComparison, compare_runs
from eagle3lab.experiments.runs_report import print_runs, write_runs
from eagle3lab.experiments.seed_intervals import seed_mean, student_quantile

from ..evaluate.evaluation_files import drawn_steps, write_run


def finished(run_dir: Path, steps: list[float], *, loss: float = 5.0, by: str = "simulated_acceptance",
             **config: Any) -> Path:  # fmt: skip
    """A run with a summary: P(steps 0..k right) of its best validation."""
    if not run_dir.is_dir():
        write_run(run_dir, **config)
    validation = {
        "update": 10,
        "tokens": 1000,
        "val/loss": loss,
        "val/simulated_acceptance_length": 1 + sum(steps),
    }
    validation |= {f"val/acceptance_step{k}": value for k, value in enumerate(steps)}
    summary = {
        "best_validation": validation, "selection": {"select_by": by}, "tokens_per_second": 1000.0, "updates": 10,
        "peak_memory_gib": 1.5, "data_wait_share": 0.02, "mfu": None, "limited_by": "compute",
    }  # fmt: skip
    (run_dir / "summary.json").write_text(json.dumps(summary))
    (run_dir / "metrics.csv").write_text(
        f"update,tokens,val/simulated_acceptance_length\n5,500,1.1\n10,1000,{1 + sum(steps)}\n"
    )
    return run_dir


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Noise none and uniform with three seeds each; one uniform run failed, one gaussian trial never began."""
    directory = tmp_path / "noise"
    lengths = {"none": (0.40, 0.42, 0.41), "uniform": (0.50, 0.53, 0.0)}
    trials: list[dict[str, Any]] = []
    for noise, first in lengths.items():
        for seed, share in enumerate(first):
            name = f"{len(trials):02d}-{noise}{seed}"
            trial = {
                "number": len(trials),
                "run_dir": name,
                "overrides": [f"noise={noise}", f"train.seed={seed}"],
            }
            if share:
                finished(directory / name, [share, share / 2], noise=noise, seed=seed)
                trials.append(trial | {"state": "finished"})
            else:
                write_run(directory / name, noise=noise, seed=seed)
                trials.append(
                    trial | {"state": "failed", "error": "UserError: boom", "log": "trials/005.log"}
                )
            provenance = json.loads((directory / name / "provenance.json").read_text())
            (directory / name / "provenance.json").write_text(
                json.dumps(provenance | {"overrides": trial["overrides"]})
            )
    trials.append({"number": 6, "overrides": ["noise=gaussian", "train.seed=0"], "state": "waiting"})
    (directory / "sweep.json").write_text(json.dumps({"trials": trials}))
    return directory


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042)]
)
def test_students_quantile_is_that_of_the_printed_tables(degrees: int, quantile: float) -> None:
    assert student_quantile(degrees) == pytest.approx(quantile, abs=6e-4)


def test_the_interval_over_seeds_by_hand() -> None:
    found = seed_mean([1.0, 2.0, 3.0])  # s = 1, t(2) = 4.3027
    assert found is not None
    assert (found.mean, found.num_runs) == (2.0, 3)
    assert found.high == pytest.approx(2.0 + 4.30265 / 3**0.5, abs=1e-4)
    assert found.low == pytest.approx(2.0 - 4.30265 / 3**0.5, abs=1e-4)
    one = seed_mean([1.5])
    assert one is not None
    assert (one.mean, one.low, one.high) == (1.5, None, None)
    assert seed_mean([]) is None


def by_label(comparison: RunComparison) -> dict[str, Any]:
    return {variant.label: variant for variant in comparison.variants}


def test_seeds_are_one_variant_best_first_and_no_trial_is_left_out(sweep: Path) -> None:
    comparison = compare_runs([sweep])
    assert [v.label for v in comparison.variants] == ["noise=uniform", "noise=none", "noise=gaussian"]
    variants = by_label(comparison)
    uniform, none = variants["noise=uniform"], variants["noise=none"]
    assert (len(uniform.runs), len(uniform.finished)) == (3, 2)
    assert uniform.value.mean == pytest.approx(1 + 1.5 * (0.50 + 0.53) / 2)
    assert none.value.mean == pytest.approx(1 + 1.5 * 0.41)
    assert comparison.baseline == "noise=none"
    assert none.change is None
    # paired by seed: 0.10 and 0.11 of the first step, the failed seed left out
    assert (uniform.change.mean, uniform.change.num_runs) == (pytest.approx(1.5 * 0.105), 2)
    assert uniform.settings == {"noise.kind": "uniform"}
    assert variants["noise=gaussian"].value is None
    states = [(run.name, run.state, run.reason.partition(" (")[0]) for run in comparison.not_finished]
    assert states == [
        ("05-uniform2", "failed", "UserError: boom"),
        ("trial 6", "unfinished", "its turn did not come"),
    ]


def test_a_record_of_a_trial_is_newer_than_the_index(sweep: Path) -> None:
    (sweep / "trials").mkdir()
    record = {
        "number": 6,
        "overrides": ["noise=gaussian", "train.seed=0"],
        "state": "failed",
        "error": "late",
    }
    record |= {"run_dir": None, "value": None, "log": "", "host": "h"}
    (sweep / "trials" / "006.json").write_text(json.dumps(record))
    assert [run.reason for run in compare_runs([sweep]).not_finished][-1] == "late"


def test_runs_of_different_steps_are_compared_over_those_that_all_have(tmp_path: Path) -> None:
    """A longer draft has the longer simulated length only because more steps are counted."""
    short = finished(tmp_path / "short", [0.50], noise="uniform")
    long = finished(tmp_path / "long", [0.45, 0.3, 0.2], noise="none")
    comparison = compare_runs([long, short])
    assert [v.runs[0].name for v in comparison.variants] == ["short", "long"]
    assert [v.value.mean for v in comparison.variants if v.value] == pytest.approx([1.50, 1.45])
    assert comparison.criterion.name == "simulated acceptance length, first 1 step"
    assert any("unrolled for 1, 3 steps" in note for note in comparison.notes)


def test_the_criterion_is_that_of_the_runs_and_losses_only_where_they_are_one_quantity(
    tmp_path: Path,
) -> None:
    runs = [
        finished(tmp_path / name, [share], loss=loss, by="loss", noise=name)
        for name, share, loss in (("none", 0.5, 3.0), ("uniform", 0.4, 2.0))
    ]
    comparison = compare_runs(runs)
    assert comparison.criterion.by is SelectBy.loss
    assert comparison.variants[0].runs[0].name == "uniform"  # the lower loss
    assert compare_runs(runs, by=SelectBy.simulated_acceptance).variants[0].runs[0].name == "none"
    for run, kind in zip(runs, ("kl", "tv"), strict=True):
        (run / "config.yaml").write_text((run / "config.yaml").read_text() + f"loss:\n  kind: {kind}\n")
    comparison = compare_runs(runs)
    assert comparison.criterion.by is SelectBy.simulated_acceptance
    assert any("losses are no one quantity here: loss.kind" in note for note in comparison.notes)


def test_a_repetition_is_named_and_not_counted_twice(tmp_path: Path) -> None:
    runs = [finished(tmp_path / name, [0.5], seed=3) for name in ("first", "again")]
    comparison = compare_runs(runs)
    assert [run.name for run in comparison.runs] == ["first"]
    assert comparison.notes == ("again repeats first, seeds included, and is not counted again",)
    assert len(compare_runs(runs, group=False).variants) == 2


def test_a_place_that_is_no_run_says_so_and_proposes_one(tmp_path: Path) -> None:
    finished(tmp_path / "noise" / "stamp" / "00-x", [0.5])
    with pytest.raises(UserError, match="neither a run nor a sweep directory") as caught:
        compare_runs([tmp_path / "noise"])
    assert caught.value.problems[0].fix == f"compare {tmp_path / 'noise' / 'stamp'}"


class Page(HTMLParser):
    """Every attribute that could fetch something, and the texts of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.cells: list[str] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attrs if name in ("src", "href", "action", "data")]
        assert tag not in ("link", "iframe", "object")
        self._in_cell = tag in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.cells.append(data)
            self._in_cell = False


def test_the_files_hold_every_run_and_the_page_needs_nothing_beside_it(sweep: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "out", tmp_path / "pages" / "page.html"
    assert write_runs(compare_runs([sweep]), out=out, html=page) == [
        out / "comparison.csv", out / "comparison.png", page,
    ]  # fmt: skip
    with (out / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["finished"] * 5 + ["failed", "unfinished"]
    assert [row["value"] for row in rows[5:]] == ["", ""]
    assert [row["train.seed"] for row in rows] == ["0", "1", "2", "0", "1", "2", ""]
    assert float(rows[3]["value"]) == pytest.approx(1.75)
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    text = page.read_text()
    found = Page(text)
    assert [source[:22] for source in found.sources] == ["data:image/png;base64,"]
    assert not re.search(r"https?:|@import|url\(", text)
    assert {"05-uniform2", "UserError: boom (" + str(sweep / "trials/005.log") + ")"} <= set(found.cells)
    before = {path: path.read_bytes() for path in (page, *out.iterdir())}
    write_runs(compare_runs([sweep]), out=out, html=page)
    assert {path: path.read_bytes() for path in before} == before


def test_settings_keep_every_digit_and_figures_six(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = ("0.00012345678", "0.00012345679", "null")
    runs = [finished(tmp_path / f"run{i}", [1 / 3], lr=rate) for i, rate in enumerate(rates)]
    comparison, page = compare_runs(runs), tmp_path / "page.html"
    write_runs(comparison, out=None, html=page)
    cells = Page(page.read_text()).cells
    for rate in rates:  # in the table of what differs, and in the row of its run; a figure is no "null"
        assert cells.count(rate) == 2
    assert cells.count("1.33333") == 2 * len(runs)  # the criterion, and the figure it is
    print_runs(comparison, Console(width=140))
    said = capsys.readouterr().out
    assert "0.00012345678" in said
    assert "0.00012345679" in said


def test_the_command_prints_the_table_for_a_sweep_and_for_runs_without_evaluation(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(sweep)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("7 runs (5 finished, 1 failed, 1 unfinished), 3 variants, by simulated acceptance")
    assert "failed     05-uniform2: UserError: boom" in said
    assert "Student's t over seeds" in said
    lines = [line for line in said.splitlines() if line.startswith(" noise=")]
    assert [line.split()[0] for line in lines] == ["noise=uniform", "noise=none", "noise=gaussian"]
    assert "2 of 3" in lines[0]
    runs = [str(path) for path in sorted(sweep.iterdir()) if path.is_dir()]
    assert main(["compare", *runs[:4], "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert [v["num_finished"] for v in content["variants"]] == [1, 3]
    assert main(["compare", str(sweep), "--k", "3"]) == 2
    assert "--k is about evaluations" in capsys.readouterr().err


def test_a_sweep_whose_drafts_were_all_decoded_is_compared_by_acceptance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for i, noise in enumerate(("none", "uniform")):
        steps = drawn_steps(20, 0.3 + 0.2 * i, seed=i)
        finished(write_run(tmp_path / "sweep" / f"{i:02d}-{noise}", steps, noise=noise), [0.5 - 0.2 * i])
    page = tmp_path / "page.html"
    assert main(["compare", str(tmp_path / "sweep"), "--html", str(page)]) == 0
    said = capsys.readouterr().out
    assert "B accepts" in said
    assert [source[:22] for source in Page(page.read_text()).sources] == ["data:image/png;base64,"]
    assert main(["compare", str(tmp_path / "sweep"), "--training"]) == 0
    assert "by simulated acceptance length" in capsys.readouterr().out


def test_a_finished_trial_whose_directory_is_gone_says_so(sweep: Path, capsys: Any) -> None:
    shutil.rmtree(sweep / "00-none0")
    main(["compare", str(sweep)])
    assert "unfinished 00-none0: its directory is no longer there" in capsys.readouterr().out


@pytest.mark.parametrize("entry", ["evaluate", "extract"])
def test_a_sweep_that_trained_nothing_is_refused(entry: str, tmp_path: Path, capsys: Any) -> None:
    trial = {"number": 0, "overrides": ["decode.k=[1]"], "state": "finished"}
    (tmp_path / "sweep.json").write_text(json.dumps({"entry": entry, "trials": [trial]}))
    assert main(["compare", str(tmp_path)]) == 2
    assert f"a sweep of {entry}.py has no training runs" in capsys.readouterr().err
