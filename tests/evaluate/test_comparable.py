"""Evaluations that cannot be compared are refused, and what differs is named."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.evaluate.comparable import Aligned, Only, align, notes
from eagle3lab.evaluate.evaluation_file import evaluations_of, find_evaluations, read_evaluation

from .evaluation_files import write_evaluation, write_run

STEPS = {"p0": [1, 0, 3], "p1": [2], "p2": []}


@pytest.fixture
def side_by_side(tmp_path: Path) -> Any:
    """Align evaluation a, plain, with b, changed."""

    def run(
        steps: Any = STEPS, only: Only | None = None, common: bool = False, **changed: Any
    ) -> list[Aligned]:
        a = write_evaluation(tmp_path / "a", changed.pop("first", STEPS))
        b = write_evaluation(tmp_path / "b", steps, **changed)
        given = {place.name: read_evaluation(place / "evaluation.json") for place in (a, b)}
        return align(given, only, common_prompts=common)

    return run


def test_counts_are_read_per_prompt_and_of_the_given_draft_alone(tmp_path: Path) -> None:
    (m,) = read_evaluation(write_evaluation(tmp_path / "a", STEPS) / "evaluation.json")
    assert [(i, p.counts.drafts, p.counts.accepted_at) for i, p in m.prompts.items()] == [
        ("p0", 3, (2, 1, 1)), ("p1", 1, (1, 1, 0)), ("p2", 0, (0, 0, 0)),
    ]  # fmt: skip
    assert str(m.setting) == "demo, k=3, T=0, hf"


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"verifier": {"name": "other", "config_hash": "d" * 64}}, ["other configuration of the verifier", "tiny (cccccccccccc) in a; other (dddddddddddd) in b"]),
        ({"template_args": {"thinking": False}}, ["other template arguments", "{} in a", "'thinking': False"]),
        ({"max_new_tokens": 128}, ["other max_new_tokens", "64 in a; 128 in b"]),
        ({"precision": "bf16"}, ["other precision", "fp32 in a; bf16 in b"]),
        ({"batch_sizes": [8, 1]}, ["other batch size of acceptance", "1 in a; 8 in b"]),
        ({"temperature": 1.0}, ["other temperature", "0.0 in a; 1.0 in b"]),
        ({"backend": "vllm"}, ["other back end", "hf in a; vllm in b"]),
        ({"prompts": {"name": "mt_bench"}}, ["other prompts", "demo in a; mt_bench in b"]),
        ({"num_prompt_tokens": {"p1": 11}}, ["other text or category under the same prompt id in a and b", "1 prompts of demo: p1"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_what_differs_is_refused_and_named(side_by_side: Any, changed: dict, says: list[str]) -> None:
    with pytest.raises(UserError) as error:
        side_by_side(**changed)
    assert all(text in str(error.value) for text in says), str(error.value)
    assert len(error.value.problems) == 1


def test_all_differences_come_together(side_by_side: Any) -> None:
    with pytest.raises(UserError) as error:
        side_by_side(precision="bf16", max_new_tokens=9, num_prompt_tokens={"p0": 1})
    assert len(error.value.problems) == 3


def test_other_k_are_refused_and_the_shared_one_can_be_chosen(side_by_side: Any) -> None:
    first, second = {1: {"p0": [1]}, 3: {"p0": [2]}}, {3: {"p0": [3]}, 5: {"p0": [0]}}
    with pytest.raises(UserError, match=r"other K .*1, 3 in a; 3, 5 in b.*\n *try: --k 3"):
        side_by_side(second, first=first)
    (aligned,) = side_by_side(second, first=first, only=Only(k=[3]))
    assert [aligned.prompts(i)[0].counts.accepted for i in (0, 1)] == [2, 3]
    with pytest.raises(UserError, match="nothing was measured in the settings asked for"):
        side_by_side(second, first=first, only=Only(k=[7]))


def test_prompts_of_one_alone_are_refused_or_left_out_and_counted(side_by_side: Any) -> None:
    fewer = {"p2": [1], "p0": [1], "p7": [2]}
    with pytest.raises(
        UserError, match=r"3 in a, 3 in b; 2 in all; not in all: p1, p7.*\n *try: --common-pr"
    ):
        side_by_side(fewer)
    (aligned,) = side_by_side(fewer, common=True)
    assert aligned.prompt_ids == ("p0", "p2")
    assert aligned.num_left_out == 2
    assert [p.counts.drafts for p in aligned.prompts(1)] == [1, 1]
    assert any(
        "2 prompts that all decoded; 2 that only some decoded" in n for n in notes([aligned], ["a", "b"])
    )
    with pytest.raises(UserError, match="0 in all"):
        side_by_side({"p9": [1]}, common=True)


def test_another_own_text_of_the_verifier_is_said(side_by_side: Any) -> None:
    aligned = side_by_side(own_text={"p1": [1, 2, 4]})
    assert any("differs between a and b for 1 of 3 prompts" in note for note in notes(aligned, ["a", "b"]))
    assert any("only its configuration was held" in note for note in notes(aligned, ["a", "b"]))


def test_known_weights_and_prompt_hashes_are_held(side_by_side: Any, tmp_path: Path) -> None:
    def verifier(weights: str) -> dict:
        return {"name": "tiny", "config_hash": "c" * 64, "weight_fingerprint": weights}

    side_by_side(verifier=verifier("w" * 64))  # a does not know its weights: nothing to hold against
    places = [write_evaluation(tmp_path / n, STEPS, verifier=verifier(n * 64)) for n in ("x", "y")]
    given = {p.name: read_evaluation(p / "evaluation.json") for p in places}
    with pytest.raises(
        UserError, match=r"other weights of the verifier.*tiny \(xxxxxxxxxxxx\) in x; tiny \(yyy"
    ):
        align(given)


def test_another_text_of_the_same_length_is_refused(tmp_path: Path) -> None:
    places = [
        write_evaluation(tmp_path / n, STEPS, prompt_sha256={"p2": n * 64}) / "evaluation.json"
        for n in ("x", "y")
    ]
    with pytest.raises(UserError, match=r"other text or category .* in x and y: '1 prompts of demo: p2'"):
        align({file.parent.name: read_evaluation(file) for file in places})


def test_what_evaluate_writes_is_read_by_k_and_temperature_at_the_first_batch_size(tmp_path: Path) -> None:
    from eagle3lab.evaluate.decoder import Decoded
    from eagle3lab.evaluate.prompts import Prompt
    from eagle3lab.evaluate.results import Evaluation, Pass, Task, Way, summarise_passes

    tasks = tuple(Task(Prompt(i, "demo", (), 0), (1, 2, n), 9) for n, i in enumerate(("p0", "p1")))
    rng = np.random.default_rng(0)

    def decoded(way: Way) -> Pass:
        steps = [tuple(int(a) for a in rng.integers(0, way.k + 1, 5)) for _ in tasks] if way.k else [()] * 2
        texts = tuple(Decoded((7, 8), 1.0, s) for s in steps)
        return Pass(way, texts, 4, 1.0, (None, None) if way.k and not way.temperature else ())

    ways = [
        Way(variant, k, temperature, batch_size)
        for batch_size in (2, 1)
        for temperature in (0.0, 1.0)
        for variant, k in (("", 0), ("untrained", 3), ("trained", 3), ("trained", 5))
    ]
    passes = tuple(decoded(way) for way in ways)
    setup = {
        "verifier": {"name": "tiny", "config_hash": "c", "weight_fingerprint": "w"}, "draft": "d",
        "prompts": {"name": "demo"}, "template_args": {}, "max_new_tokens": 9, "precision": "fp32",
        "backend": "vllm", "batch_sizes": [2, 1], "proposal": "greedy",
    }  # fmt: skip
    result = Evaluation(setup, summarise_passes(tasks, passes, seed=0), tasks, passes, ("", ""))
    found = read_evaluation(result.write(tmp_path))
    assert [str(m.setting) for m in found] == [f"demo, k={k}, T={t}, vllm" for t in (0, 1) for k in (3, 5)]
    for m in found:
        wanted = result.variant("trained", m.setting.k, m.setting.temperature)
        assert sum(p.counts.drafts for p in m.prompts.values()) == wanted.overall.drafts
        assert sum(p.counts.accepted for p in m.prompts.values()) == sum(wanted.overall.accepted_at)
        assert [p.prompt_sha256 for p in m.prompts.values()] == [task.sha256 for task in tasks]
        assert m.conditions["proposal of drafted tokens"] == ("greedy" if m.setting.temperature else None)


def test_places_that_stand_for_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS)
    file = run / "evaluation-demo" / "evaluation.json"
    for place in (run, run / "draft", file.parent, file):
        assert find_evaluations(place) == [file]
    other = write_evaluation(run / "evaluation-more", STEPS, prompts={"name": "more"}) / "evaluation.json"
    assert find_evaluations(run) == [file, other]
    assert [str(m.source) for m in evaluations_of(run / "draft")] == [str(file), str(other)]
    (run / "draft_last").mkdir()
    (run / "draft_last" / "model.safetensors").touch()
    with pytest.raises(UserError, match=r"nothing was evaluated there(.|\n)*evaluate\.py draft=.*draft_last"):
        evaluations_of(run / "draft_last")
    with pytest.raises(UserError, match="nothing was evaluated there") as refused:
        find_evaluations(write_run(tmp_path / "not yet"))
    words = shlex.split(refused.value.problems[0].fix)  # to be copied, blanks or not
    assert words == ["python", "evaluate.py", f"draft={tmp_path / 'not yet' / 'draft'}"]
    with pytest.raises(UserError, match="no such directory"):
        find_evaluations(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda c: c.update(format="something"), "of another format: 'something, 1'"),
        (lambda c: c.pop("format"), "is no evaluation"),
        (lambda c: c.update(format_version=99), "of another format.*99.*version 1"),
        (lambda c: c["setup"].pop("precision"), "is damaged: \"KeyError: 'precision'"),
        (lambda c: c["prompts"][0]["trials"][1]["accepted_per_step"].pop(), "3 verification steps in the prompts, 4"),
        (lambda c: c.update(variants=[]), "holds no decoded draft"),
    ],
    ids=["format", "no format", "version", "key", "count", "empty"],
)  # fmt: skip
def test_a_file_that_is_not_what_it_says_is_refused(tmp_path: Path, edit: Any, says: str) -> None:
    file = write_evaluation(tmp_path / "a", STEPS) / "evaluation.json"
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))
    with pytest.raises(IntegrityError, match=says):
        read_evaluation(file)


def test_the_same_setting_in_two_files_of_one_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", STEPS)
    write_evaluation(run / "evaluation-again", STEPS)
    measurements = evaluations_of(run)
    with pytest.raises(UserError, match="run holds demo, k=3, T=0, hf twice"):
        align({"run": measurements, "b": measurements[:1]})
