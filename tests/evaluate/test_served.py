"""Evaluation by vLLM without vLLM: engines that stand in for it, one after the other."""

from __future__ import annotations

import io
import json
from typing import ClassVar

import pytest
import torch
from rich.console import Console

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import (
    Backend,
    DecodeConfig,
    EngineConfig,
    HardwareConfig,
    ModelConfig,
    PromptsConfig,
)
from eagle3lab.draft.export import export_draft
from eagle3lab.engines.base import EngineError
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.vllm_decode import DecodedPass, DecodedSteps, EngineCounts
from eagle3lab.evaluate import run
from eagle3lab.evaluate.prompts import Prompt
from eagle3lab.evaluate.results import Task, Way, summarise_passes
from eagle3lab.evaluate.served import decode_by_vllm

END = 9
PLAIN = [10, 11, 12, 13, 14, 15, END]
TASKS = [Task(Prompt(name, name, (), 0), (1, 2, i), 16) for i, name in enumerate("ab")]


class FakeRunner:
    """Says `texts[k]` for every prompt, k + 1 tokens a step, in `seconds` a pass; one alive at a time."""

    alive = 0
    log: ClassVar[list[tuple[str, int]]] = []

    def __init__(self, decoding, texts, seconds=1.0, logits=None):
        self.k, self.texts, self.seconds, self.logits = decoding.k, texts, seconds, logits or {}
        self.asked: list[int] = []
        assert FakeRunner.alive == 0
        FakeRunner.alive += 1
        FakeRunner.log.append((decoding.draft.name if decoding.draft else "", decoding.k))

    def versions(self):
        return {"vllm": "0"}

    def decode(self, requests, temperature, at_once, end_ids):
        text = self.texts[self.k]
        rest = [text[i : i + self.k + 1] for i in range(1, len(text), self.k + 1)]
        steps = (tuple(text[:1]), *(tuple(s) for s in rest))
        return DecodedPass(
            tuple(DecodedSteps(steps, 0.5) for _ in requests), self.seconds / at_once, 0, 0, EngineCounts()
        )

    def top_logits(self, rows):
        return [self.logits for _ in rows]

    def close(self):
        FakeRunner.alive -= 1


def serve(tmp_path, texts, logits=None, near_tie=1e-4, **options):
    FakeRunner.log.clear()
    heard = []
    request = EngineRequest(tmp_path, None, ModelConfig(name="m"), torch.float32, "cpu", 64, 32)  # type: ignore[arg-type]
    served = decode_by_vllm(
        request,
        {"trained": tmp_path / "draft"},
        TASKS,
        DecodeConfig(k=[1, 2], batch_sizes=[1, 2], **options),
        end_ids=frozenset({END}),
        near_tie=near_tie,
        done=heard.append,
        start=lambda _request, decoding: FakeRunner(decoding, texts, 1.0 if decoding.k else 3.0, logits),
    )
    assert len(heard) == len(served.passes)
    assert FakeRunner.alive == 0
    return served


def test_one_engine_per_k_and_the_verifier_alone_last_each_closed_before_the_next(tmp_path):
    served = serve(tmp_path, dict.fromkeys((0, 1, 2), PLAIN))
    assert FakeRunner.log == [("draft", 1), ("draft", 2), ("", 0)]
    assert [p.way for p in served.passes] == [
        Way(name, k, 0.0, size) for name, k in (("trained", 1), ("trained", 2), ("", 0)) for size in (1, 2)
    ]
    one, two = summarise_passes(TASKS, served.passes, seed=0)
    assert (one.overall.drafts, one.overall.accepted_at) == (6, (6,))
    assert (two.overall.drafts, two.overall.accepted_at) == (4, (4, 4))
    assert [(x.batch_size, x.speed_ratio, x.num_identical) for x in one.speeds] == [(1, 3.0, 2), (2, 3.0, 2)]
    assert one.speeds[1].draft_tokens_per_second == pytest.approx(2 * 7 / 0.5)
    assert one.per_category.keys() == {"a", "b"}


def test_a_step_cut_by_the_end_token_counts_in_full(tmp_path):
    served = serve(tmp_path, {0: [*PLAIN[:3], END], 1: [*PLAIN[:3], END, 50], 2: [*PLAIN[:3], END]})
    text = served.passes[0].texts[0]
    assert text.tokens == (10, 11, 12, END)
    assert text.accepted == (1, 1)
    assert text.num_cut == 1
    assert served.passes[-1].texts[0].accepted == ()


@pytest.mark.parametrize(("gap", "tie"), [(0.001, True), (1.0, False)])
def test_a_difference_is_judged_by_the_engine_without_a_draft(tmp_path, gap, tie):
    other = [*PLAIN[:4], 77, 15, END]
    served = serve(tmp_path, {0: PLAIN, 1: PLAIN, 2: other}, {14: 20.0, 77: 20.0 - gap})
    same, _, differs, *_ = served.passes
    assert same.differences == (None, None)
    difference = differs.differences[1]
    assert (difference.position, difference.plain, difference.drafted) == (4, 14, 77)
    assert difference.logit_gap == pytest.approx(gap)
    assert difference.near_tie == tie
    result = summarise_passes(TASKS, served.passes, seed=0)[1]
    assert (result.num_identical, result.num_near_ties) == (0, 2 * tie)


def test_a_token_that_is_not_among_the_largest_logits_is_no_tie(tmp_path):
    other = [*PLAIN[:4], 77, 15, END]
    served = serve(tmp_path, {0: PLAIN, 1: PLAIN, 2: other}, {14: 20.0, 3: 19.9})
    assert served.passes[2].differences[0].logit_gap is None
    assert not served.passes[2].differences[0].near_tie


def test_sampled_texts_are_not_compared(tmp_path):
    served = serve(tmp_path, {0: PLAIN, 1: PLAIN[::-1], 2: PLAIN}, temperature=[1.0])
    assert all(p.differences == () for p in served.passes)
    assert summarise_passes(TASKS, served.passes, seed=0)[0].num_identical is None


def test_an_engine_that_ends_is_a_users_error_and_is_closed(tmp_path, monkeypatch):
    def dead(*_args):
        raise EngineError("the engine ended")

    monkeypatch.setattr(FakeRunner, "decode", dead)
    with pytest.raises(UserError, match=r"vLLM did not decode .*the engine ended"):
        serve(tmp_path, {})
    assert FakeRunner.alive == 0


def test_the_cpu_build_does_not_sample_in_processes_of_its_own(tmp_path):
    request = EngineRequest(
        tmp_path, None, ModelConfig(name="m"), torch.float32, "cpu", 64, 32, EngineConfig(tensor_parallel=2)  # type: ignore[arg-type]
    )  # fmt: skip
    with pytest.raises(UserError, match="samples wrongly with a draft"):
        decode_by_vllm(
            request, {}, TASKS, DecodeConfig(temperature=[0.0, 1.0]), end_ids=frozenset(), near_tie=0.1, done=print
        )  # fmt: skip


@pytest.fixture
def prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"id": "a", "turns": ["hello"]}) + "\n")
    return path


def evaluate(pair, draft, prompt_file, out, **options):
    return run.evaluate_draft(
        draft=draft,
        model=ModelConfig(name="random", path=str(pair.path)),
        hardware=HardwareConfig(name="cpu"),
        prompts=PromptsConfig(name="test", path=str(prompt_file)),
        decode=DecodeConfig(**{"max_new_tokens": 8, **options}),
        out=out,
        console=Console(file=io.StringIO()),
    )


@pytest.mark.parametrize("backend", [Backend.vllm, Backend.hf])
def test_a_draft_of_another_verifier_is_refused_before_an_engine_starts(
    backend, succ_pair, random_pair, prompt_file, tmp_path, monkeypatch
):
    def started(*_args, **_options):
        raise AssertionError("an engine was started")

    monkeypatch.setattr(run, "decode_by_vllm", started)
    monkeypatch.setattr(run, "HuggingFaceEngine", started)
    export_draft(succ_pair.draft(), tmp_path / "draft", {})
    with pytest.raises(UserError, match="belongs to another verifier") as refused:
        evaluate(random_pair, tmp_path / "draft", prompt_file, tmp_path / "out", backend=backend)
    assert "vocabulary of the draft's verifier: 64; expected 264" in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_the_reference_decoder_refuses_batches(random_pair, prompt_file, tmp_path):
    export_draft(random_pair.draft(), tmp_path / "draft", {})
    with pytest.raises(UserError, match="one text at a time"):
        evaluate(random_pair, tmp_path / "draft", prompt_file, tmp_path / "out", batch_sizes=[1, 4])


def test_an_unexplained_difference_in_vllm_is_written_and_refused(
    random_pair, prompt_file, tmp_path, monkeypatch
):
    def served(_request, drafts, tasks, decode, **how):
        texts = {0: PLAIN, 3: [*PLAIN[:4], 77, 15, END]}
        return decode_by_vllm(
            _request, drafts, tasks, decode, **{**how, "end_ids": frozenset({END})},
            start=lambda _request, decoding: FakeRunner(decoding, texts, logits={14: 9.0, 77: 2.0}),
        )  # fmt: skip

    monkeypatch.setattr(run, "decode_by_vllm", served)
    export_draft(random_pair.draft(), tmp_path / "draft", {})
    with pytest.raises(IntegrityError, match=r"k=3, 2 together: .* at new token 4") as refused:
        evaluate(
            random_pair, tmp_path / "draft", prompt_file, tmp_path / "out", backend=Backend.vllm, batch_sizes=[1, 2]
        )  # fmt: skip
    assert "the decoder (vllm) is at fault" in str(refused.value)
    content = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert content["setup"]["backend"] == "vllm"
    assert [t["difference"]["logit_gap"] for t in content["prompts"][0]["trials"]] == [7.0, 7.0]
