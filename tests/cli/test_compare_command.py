"""`python -m eagle3lab compare ...` as a user runs it."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3lab.__main__ import main

from ..evaluate.evaluation_files import drawn_steps, write_evaluation, write_run

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Three seeds of a baseline, three of a better recipe, and one of a third that is as the baseline."""
    made = []
    for recipe, noise, rate in (("base", "none", 0.4), ("better", "uniform", 0.5), ("same", "gaussian", 0.4)):
        for seed in range(1 if recipe == "same" else 3):
            steps = drawn_steps(40, rate, seed=10 * seed + len(recipe))
            made.append(str(write_run(tmp_path / f"{recipe}{seed}", steps, noise=noise, seed=seed)))
    return made


def test_seeds_are_one_variant_and_verdicts_have_intervals(runs: list[str], capsys, tmp_path: Path) -> None:
    assert main(["compare", *runs]) == 0
    said = capsys.readouterr().out
    lines = said.splitlines()
    assert lines[0].startswith("A: noise.kind=none; 3 runs that differ in seeds alone: ")
    assert "base1 (train.seed=1)" in lines[0]
    assert lines[2] == f"C: noise.kind=gaussian; {runs[-1]}"
    assert any(line.startswith(" B noise.kind=uniform") for line in lines)
    better = next(line for line in lines if line.startswith("B accepts"))
    assert " more tokens per step than A [0." in better
    assert any(line.startswith("C against A: no difference shown (") for line in lines)
    table = [line.split() for line in lines if line.startswith(" noise.kind")]
    assert table[0][:2] == ["noise.kind", "uniform"]  # best first
    assert "in every resample 2 of its 3 runs" in said
    assert "one run of C: the interval does not cover training again" in said
    assert "Holm" in said
    assert max(map(len, said.splitlines())) < 1000


def test_json_and_files_hold_the_same_figures(runs: list[str], capsys, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["compare", *runs, "--json", "--out", str(out)]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["format"] == "eagle3lab-comparison"
    assert content["best_first"][0] == "B"
    assert content["differing"] == {"noise.kind": {"A": "none", "B": "uniform", "C": "gaussian"}}
    assert [(r["category"], r["variant"]) for r in content["rows"]] == [
        (category, v) for category in ("all", "even", "odd") for v in "ABC"
    ]
    with (out / "comparison.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [r["difference"] for r in rows] == [
        "" if r["difference"] is None else str(r["difference"]) for r in content["rows"]
    ]
    assert (out / "comparison.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(p.name for p in out.iterdir()) == ["comparison.csv", "comparison.png"]
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    assert main(["compare", *runs, "--json", "--out", str(out)]) == 0
    assert json.loads(capsys.readouterr().out) == content
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before


def test_the_pooled_figure_is_the_evaluations_own(runs: list[str], capsys) -> None:
    main(["compare", runs[0], runs[-1], "--json"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    evaluation = json.loads((Path(runs[0]) / "evaluation-demo" / "evaluation.json").read_text())
    for category in ("all", "even", "odd"):
        row = next(r for r in rows if (r["category"], r["variant"]) == (category, "A"))
        prompts = [p for p in evaluation["prompts"] if category in ("all", p["category"])]
        trials = [t for p in prompts for t in p["trials"] if t["variant"] == "trained"]
        steps = [accepted for t in trials for accepted in t["accepted_per_step"]]
        assert row["num_prompts"] == len(prompts)
        assert row["acceptance_length"] == pytest.approx(1 + sum(steps) / len(steps))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["base0", "base1"], "nothing to compare: all runs differ in their seeds alone"),
        (["base0"], "nothing to compare with"),
        (["base0", "base0"], "the same draft is named twice"),
        (["base0", "nowhere"], "no such directory"),
        (["nowhere"], "no such directory"),
        (["base0", "better0", "--k", "5"], "nothing was measured in the settings asked for"),
        (["base0", "again0", "better0"], "two runs of the same configuration and the same seed"),
        (["base0", "fewer"], "--common-prompts"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
def test_a_mistake_is_one_message_and_exit_code_2(
    runs: list[str], tmp_path: Path, capsys, monkeypatch, words: list[str], says: str
) -> None:
    write_run(tmp_path / "again0", drawn_steps(40, 0.4, seed=1))
    write_run(tmp_path / "fewer", drawn_steps(38, 0.4, seed=1), noise="uniform")
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *words]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: ")
    assert says in said.err
    assert said.out == ""


def test_what_the_messages_propose_helps(runs: list[str], tmp_path: Path, capsys, monkeypatch) -> None:
    write_run(tmp_path / "fewer", drawn_steps(38, 0.4, seed=1), noise="uniform", lr="0.1")
    monkeypatch.chdir(tmp_path)
    assert main(["compare", "base0", "fewer", "--common-prompts"]) == 0
    assert "over the 38 prompts that all decoded; 2 that only some" in capsys.readouterr().out
    assert main(["compare", "base0", "base1", "--no-group"]) == 0
    assert "B against A" in capsys.readouterr().out
    assert (
        main(["compare", "base0", "base1", "better0", "better1", "--ignore", "noise.kind", "--no-group"]) == 0
    )


def test_a_draft_from_elsewhere_is_compared_and_said_to_be_unknown(tmp_path: Path, capsys) -> None:
    places = [write_evaluation(tmp_path / n / "e", drawn_steps(20, 0.4, seed=i)) for i, n in enumerate("xy")]
    assert main(["compare", *map(str, places)]) == 0
    assert "no config.yaml beside the draft of A, B" in capsys.readouterr().out


def test_the_configuration_is_found_from_anywhere_and_never_a_strangers(tmp_path: Path, capsys) -> None:
    def differing(*words: object) -> dict:
        assert main(["compare", *map(str, words), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["differing"]

    steps = drawn_steps(10, 0.4, seed=0)
    runs = [write_run(tmp_path / n, steps, noise=n) for n in ("none", "uniform")]
    want = {"noise.kind": {"A": "none", "B": "uniform"}}
    assert differing(*runs) == differing(*(run / "draft" for run in runs)) == want
    elsewhere = write_evaluation(tmp_path / "out", steps, draft=str(runs[1] / "draft"))
    assert differing(runs[0], elsewhere) == want
    moved = [run.rename(tmp_path / f"moved_{run.name}") for run in runs]
    assert differing(*moved) == want
    (tmp_path / "stranger").mkdir()
    (tmp_path / "stranger" / "draft").mkdir()
    theirs = write_evaluation(moved[1] / "kept_here", steps, draft=str(tmp_path / "stranger" / "draft"))
    assert differing(moved[0], theirs) == {}


def test_several_sets_of_prompts_are_compared_each_by_itself(tmp_path: Path, capsys) -> None:
    runs = [write_run(tmp_path / n, drawn_steps(20, 0.4, seed=1), noise=n) for n in ("none", "uniform")]
    for i, run in enumerate(runs):
        more = {"prompts": {"name": "more"}, "draft": str(run / "draft")}
        write_evaluation(run / "evaluation-more", drawn_steps(30, 0.2 + 0.3 * i, seed=i), **more)
    assert main(["compare", *map(str, runs), "--json"]) == 0
    verdicts = json.loads(capsys.readouterr().out)["verdicts"]
    assert list(verdicts) == ["demo, k=3, T=0, hf", "more, k=3, T=0, hf"]
    assert verdicts["demo, k=3, T=0, hf"] == ["B against A: no difference shown (0.00 [0.00, 0.00])"]
    assert verdicts["more, k=3, T=0, hf"][0].startswith("B accepts")
    assert main(["compare", "--prompts", "more", *map(str, runs), "--json"]) == 0
    assert list(json.loads(capsys.readouterr().out)["verdicts"]) == ["more, k=3, T=0, hf"]


def test_it_starts_at_once_without_torch(runs: list[str]) -> None:
    code = (
        "import sys, time; started = time.perf_counter()\n"
        "from eagle3lab.__main__ import main\n"
        f"code = main(['compare', {runs[0]!r}, {runs[-1]!r}])\n"
        "heavy = {'torch', 'lightning', 'transformers', 'speculators', 'matplotlib'} & set(sys.modules)\n"
        "print('HEAVY', code, sorted(heavy)); print(time.perf_counter() - started)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    *_, heavy, seconds = done.stdout.splitlines()
    assert heavy == "HEAVY 0 []"
    assert float(seconds) < 3  # under one second on an idle core
