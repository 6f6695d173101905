from __future__ import annotations

import io
import json

import pytest
import torch
from rich.console import Console

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import DecodeConfig, HardwareConfig, ModelConfig, PromptsConfig
from eagle3lab.draft.export import export_draft
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.evaluate.drafts import other_template_args, untrained_copy
from eagle3lab.evaluate.plot import plot_acceptance
from eagle3lab.evaluate.report import category_table, figures, results_table, summary_figures
from eagle3lab.evaluate.run import evaluate_draft


@pytest.fixture(scope="module")
def draft_dir(random_pair, tmp_path_factory):
    path = tmp_path_factory.mktemp("run") / "draft"
    export_draft(random_pair.draft(seed=9), path, {"test": True})
    return path


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    records = [
        {"id": "a", "category": "writing", "turns": ["hello", "and then?"]},
        {"id": "b", "category": "maths", "turns": ["2+2"]},
        {"id": "c", "category": "maths", "turns": ["x" * 200]},
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return path


def evaluate(pair, draft_dir, prompt_file, out, console=None, **options):
    return evaluate_draft(
        draft=draft_dir,
        model=ModelConfig(name="random", path=str(pair.path)),
        hardware=HardwareConfig(name="cpu"),
        prompts=PromptsConfig(name="test", path=str(prompt_file)),
        decode=DecodeConfig(**{"k": [1, 3], "max_new_tokens": 12, "untrained": True, **options}),
        out=out,
        console=console or Console(file=io.StringIO()),
    )


@pytest.fixture(scope="module")
def evaluation(random_pair, draft_dir, prompt_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("evaluation")
    return out, evaluate(random_pair, draft_dir, prompt_file, out)


def test_every_draft_and_k_is_measured_over_every_prompt(evaluation):
    _, result = evaluation
    assert [(v.variant, v.k) for v in result.variants] == [
        ("trained", 1), ("trained", 3), ("untrained", 1), ("untrained", 3),
    ]  # fmt: skip
    for v in result.variants:
        assert v.num_identical == v.overall.num_prompts == 2
        assert v.overall.acceptance_length >= 1
        assert sum(s.drafts for s in v.per_category.values()) == v.overall.drafts
        assert v.speed_ratio == pytest.approx(v.draft_tokens_per_second / v.plain_tokens_per_second)
    assert result.variant("untrained", 3).k == 3


def test_the_plain_text_is_the_verifiers_greedy_text(evaluation, random_pair):
    _, result = evaluation
    for task, own in zip(result.tasks, result.plain.texts, strict=True):
        text = "<|turn|>user\n" + task.prompt.messages[0]["content"] + "<|end|>\n<|turn|>assistant\n"
        ids = [
            token
            for i, piece in enumerate(text.replace("<|end|>", "<|turn|>").split("<|turn|>"))
            for token in ([[257, 258, 257][i - 1]] if i else []) + list(piece.encode())
        ]
        assert list(task.ids) == ids
        assert list(own.tokens) == random_pair.engine.generate(ids, 12)


def test_the_file_holds_counts_conventions_and_what_was_left_out(evaluation):
    out, result = evaluation
    content = json.loads((out / "evaluation.json").read_text())
    assert content["setup"]["prompts"] == {
        "name": "test", "num_read": 3, "num_decoded": 2, "left_out": {"too_long": ["c"]}, "num_turns_left_out": 1,
    }  # fmt: skip
    assert "bonus" in content["conventions"]["acceptance_length"]
    trial = content["prompts"][0]["trials"][1]
    assert (trial["variant"], trial["k"], trial["identical"]) == ("trained", 3, True)
    emitted = 1 + sum(trial["accepted_per_step"]) + len(trial["accepted_per_step"]) - trial["num_cut_tokens"]
    assert emitted == trial["num_new_tokens"]
    assert content["variants"][0]["overall"]["drafts"] == result.variants[0].overall.drafts
    assert list(out.iterdir()) == [out / "evaluation.json"]


def test_the_figures_repeat_in_another_run(evaluation, random_pair, draft_dir, prompt_file, tmp_path):
    again = evaluate(random_pair, draft_dir, prompt_file, tmp_path)
    assert [v.overall for v in again.variants] == [v.overall for v in evaluation[1].variants]


def test_table_and_plot_are_made(evaluation, tmp_path):
    _, result = evaluation
    said = io.StringIO()
    console = Console(file=said, width=80)
    console.print(results_table(result))
    console.print(category_table(result))
    assert "with the bonus token" in said.getvalue()
    assert "\u2026" not in said.getvalue()  # nothing is cut at 80 columns
    assert "2/2" in said.getvalue()
    assert "maths" in said.getvalue()
    png = plot_acceptance(result, tmp_path)
    assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert list(tmp_path.iterdir()) == [png]


@pytest.fixture(scope="module")
def sampled(random_pair, draft_dir, prompt_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("sampled")
    return out, evaluate(random_pair, draft_dir, prompt_file, out, temperature=[0.0, 1.0], untrained=False)


def test_temperatures_stand_side_by_side_and_sampled_texts_repeat(
    evaluation, sampled, random_pair, draft_dir, prompt_file, tmp_path
):
    _, result = sampled
    assert [(v.k, v.temperature) for v in result.variants] == [(1, 0.0), (3, 0.0), (1, 1.0), (3, 1.0)]
    greedy = {v.k: v.overall for v in evaluation[1].variants if v.variant == "trained"}
    assert all(v.overall == greedy[v.k] for v in result.variants if v.temperature == 0)
    assert [v.num_identical for v in result.variants] == [2, 2, None, None]
    again = evaluate(random_pair, draft_dir, prompt_file, tmp_path, temperature=[1.0], untrained=False)
    drawn = [[p.texts[0].tokens for p in r.passes if p.way.temperature == 1] for r in (result, again)]
    assert drawn[0] == drawn[1]
    other = evaluate(
        random_pair, draft_dir, prompt_file, tmp_path, temperature=[1.0], untrained=False, seed=5
    )
    assert [p.texts[0].tokens for p in other.passes] != drawn[0]


def test_the_table_says_temperature_proposal_and_what_training_simulated(sampled, tmp_path):
    _, result = sampled
    result.setup["simulated"] = {"acceptance_length": 1.46, "ttt_steps": 3, "update": 9}
    said = io.StringIO()
    Console(file=said, width=120).print(results_table(result))
    text = " ".join(said.getvalue().split())
    assert "greedy and T=1, sampled text drafted greedy, fp32 on cpu, hf" in text
    assert "simulated in training: 1.46, 3 steps deep" in text
    columns, rows = figures(result)
    assert all(len(row) == len(columns) for row in rows)
    assert [dict(zip(columns, row, strict=True))["simulated"] for row in rows] == [1.46] * 4
    summary = summary_figures(result)
    assert (
        summary["trained/k3/T1/acceptance_length"]
        == result.variant(k=3, temperature=1.0).overall.acceptance_length
    )
    assert summary["simulated_acceptance_length"] == 1.46
    assert plot_acceptance(result, tmp_path).is_file()


def test_the_draft_vocabulary_and_its_coverage_stand_beside(random_pair, prompt_file, tmp_path):
    """VOC-05: what the verifier said is known; a third of the vocabulary covers what of it lies there."""
    vocabulary = DraftVocabulary.from_ids(range(0, 264, 3), 264)
    draft = tmp_path / "draft"
    export_draft(random_pair.draft(seed=9, vocabulary=vocabulary), draft, {})
    result = evaluate(random_pair, draft, prompt_file, tmp_path / "out", untrained=False)
    own = [token for text in result.plain.texts for token in text.tokens]
    assert result.setup["draft_vocabulary"] == {
        "size": 88, "coverage": pytest.approx(sum(token % 3 == 0 for token in own) / len(own)),
    }  # fmt: skip


def test_the_untrained_copy_is_what_build_draft_starts_from(random_pair):
    draft = random_pair.draft(seed=9, num_layers=2, norm_before_fc=True)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.requires_grad:
                parameter += 0.1
        draft.lm_head.weight += 0.1  # as one that was trained too
    fresh, want = untrained_copy(draft, 5), random_pair.draft(seed=5, num_layers=2, norm_before_fc=True)
    assert all(torch.equal(a, b) for a, b in zip(fresh.parameters(), want.parameters(), strict=True))


def test_a_text_that_differs_without_a_tie_is_written_and_refused(
    random_pair, draft_dir, prompt_file, tmp_path, monkeypatch
):
    from eagle3lab.evaluate import reference

    decode = reference.decode_with_draft

    def faulty(*args):
        decoded = decode(*args)
        return type(decoded)((*decoded.tokens[:3], 7, *decoded.tokens[4:]), *list(vars(decoded).values())[1:])

    monkeypatch.setattr(reference, "decode_with_draft", faulty)
    with pytest.raises(
        IntegrityError, match=r"prompt a, trained draft, k=1, 1 together: the text leaves .* at new token 3"
    ):
        evaluate(random_pair, draft_dir, prompt_file, tmp_path)
    assert not json.loads((tmp_path / "evaluation.json").read_text())["prompts"][0]["trials"][0]["identical"]


def test_prompts_that_all_do_not_fit_are_an_error(random_pair, draft_dir, tmp_path):
    file = tmp_path / "long.jsonl"
    file.write_text(json.dumps({"id": "l", "turns": ["x" * 300]}) + "\n")
    with pytest.raises(UserError, match="none of the 1 prompts of test fits"):
        evaluate(random_pair, draft_dir, file, tmp_path)


def test_prompts_rendered_otherwise_than_the_training_rows_are_said(random_pair, tmp_path):
    draft = tmp_path / "draft"
    export_draft(random_pair.draft(seed=9), draft, {"store": {"template_args": {"enable_thinking": False}}})
    model = ModelConfig(name="random", path=str(random_pair.path))
    assert "enable_thinking" in str(other_template_args(draft, model))
    model.template_args = {"enable_thinking": False}
    assert other_template_args(draft, model) is None
