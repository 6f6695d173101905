"""Decoding by vLLM on the CPU in fp32: pairs with a known answer, and the reference decoder on the same prompts."""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from rich.console import Console

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import (
    Backend,
    DecodeConfig,
    EngineConfig,
    HardwareConfig,
    ModelConfig,
    PromptsConfig,
)
from eagle3lab.draft.export import export_draft
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.engines.request import EngineRequest
from eagle3lab.engines.vllm_decode import DecodeRequest, EngineCounts
from eagle3lab.engines.vllm_settings import Decoding
from eagle3lab.evaluate.acceptance import AcceptanceCounts, summarise
from eagle3lab.evaluate.decoder import decode_with_draft, prefill
from eagle3lab.evaluate.run import evaluate_draft

from ..evaluate import known_pairs

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vllm is not installed: make test VLLM=1"
)

BUDGET = 41


@pytest.fixture(scope="module")
def succ(tmp_path_factory):
    return known_pairs.make_succ_pair(tmp_path_factory.mktemp("succ"))


@pytest.fixture(scope="module")
def random(tmp_path_factory):
    return known_pairs.make_random_pair(tmp_path_factory.mktemp("random"))


def start(pair, draft: Path | None, k: int, proposal: str = "greedy", **parallel: int):
    from eagle3lab.engines.vllm_start import start_vllm_decoder

    request = EngineRequest(
        pair.path, pair.facts, ModelConfig(name="test"), torch.float32, "cpu", max_len=128, batch_tokens=64,
        parallel=EngineConfig(**parallel),
    )  # fmt: skip
    return start_vllm_decoder(request, Decoding(4, draft, k, proposal))


def by_reference(pair, module, prompts, k: int, budget: int, end_ids) -> list[tuple[int, ...]]:
    """Accepted tokens of every step of every text."""
    found = []
    for prompt in prompts:
        begun = prefill(session := pair.engine.session(known_pairs.AUX), prompt)
        drafter = partial(ChainDrafter, module)
        found.append(decode_with_draft(session, begun, drafter, k, budget, end_ids).accepted)
    return found


def accepted(found) -> list[tuple[int, ...]]:
    return [tuple(len(step) - 1 for step in text.steps[1:]) for text in found.texts]


def asked(prompts, budget: int) -> list[DecodeRequest]:
    return [DecodeRequest(tuple(p), budget, i) for i, p in enumerate(prompts)]


def test_the_known_answer_pair_gives_exactly_2_tokens_per_step_in_both_decoders(succ, tmp_path):
    """Also where the end token or the budget lies inside a step: it counts in full."""
    prompts = [[7, first] for first in (5, 9, 20, 33)]
    draft = known_pairs.make_one_right(succ)
    export_draft(draft, tmp_path / "draft", {})
    engine = start(succ, tmp_path / "draft", 3)
    try:
        passes = [engine.decode(asked(prompts, BUDGET), 0.0, size, {1}) for size in (1, 3)]
        cut = engine.decode(asked(prompts, 12), 0.0, 3, {13})
        logits = engine.top_logits(prompts)
    finally:
        engine.close()
    reference = by_reference(succ, draft, prompts, 3, BUDGET, {1})
    for found in passes:
        assert found.counts == EngineCounts(80, 240, (80, 0, 0))
        assert found.late_steps == 0
        assert accepted(found) == reference
    stats = summarise([AcceptanceCounts.from_steps(a, 3) for a in reference])
    assert (stats.drafts, stats.accepted_at, stats.acceptance_length) == (80, (80, 0, 0), 2.0)
    assert accepted(cut) == by_reference(succ, draft, prompts, 3, 12, {13})
    assert [text.steps[-1] for text in cut.texts] == [(13, 14), (13, 14), (32, 33), (45, 46)]
    assert cut.counts == EngineCounts(18, 54, (18, 0, 0))
    for prompt, found in zip(prompts, logits, strict=True):
        with torch.no_grad():
            want = succ.engine.model(torch.tensor([prompt])).logits[0, -1]
        assert int(want.argmax()) == max(found, key=found.__getitem__)
        assert all(abs(float(want[token]) - value) < 1e-4 for token, value in found.items())


def test_drafts_of_a_restricted_vocabulary_are_counted_alike(succ, tmp_path):
    """VOC-05: every other token is outside the draft vocabulary and is never right."""
    vocabulary = DraftVocabulary.from_ids(range(0, known_pairs.SIZE, 2), known_pairs.SIZE)
    draft = known_pairs.make_one_right(succ, vocabulary)
    prompts = [[7, 9], [7, 10], [4]]
    export_draft(draft, tmp_path / "draft", {})
    engine = start(succ, tmp_path / "draft", 2)
    try:
        found = engine.decode(asked(prompts, BUDGET), 0.0, 3, {1})
    finally:
        engine.close()
    assert accepted(found) == by_reference(succ, draft, prompts, 2, BUDGET, {1})
    for text in found.texts:
        for step in text.steps[1:]:
            assert (len(step) == 2) == (step[0] % 2 == 0)
    assert 0 < found.counts.accepted_at[0] < found.counts.drafts


@pytest.mark.parametrize("proposal", ["greedy", "probabilistic"])
def test_sampled_texts_are_the_verifiers_and_accepted_as_often_as_theory_says(
    succ, tmp_path, proposal, capsys
):
    """At temperature 2 the successor has probability e^4 / (e^4 + 63), and every other token 1 / (e^4 + 63).

    Expected at position 0, given a text: p of the drafted token, or the overlap of p and q, from Hugging Face.
    """
    temperature, k, budget = 2.0, 2, 60
    soft = known_pairs.make_succ_pair(tmp_path / "soft", 1.0)
    prompts = [[7, 5 + 6 * i] for i in range(6)]
    module = known_pairs.make_one_right(soft, weight=0.8)
    export_draft(module, tmp_path / "draft", {})
    engine = start(soft, tmp_path / "draft", k, proposal)
    try:
        found = engine.decode(asked(prompts, budget), temperature, 4, ())
    finally:
        engine.close()
    expected, variance, right, chances = 0.0, 0.0, 0, 0
    for prompt, text in zip(prompts, found.texts, strict=True):
        tokens = list(prompt)
        for i, step in enumerate(text.steps):
            if i:
                chance = overlap(soft, module, tokens, temperature, proposal)
                expected, variance = expected + chance, variance + chance * (1 - chance)
            tokens += step
        pairs = [(x, y) for x, y in itertools.pairwise(tokens[1:]) if x >= 3]
        right += sum(y == known_pairs.successor(x) for x, y in pairs)
        chances += len(pairs)
    took = found.counts.accepted_at[0]
    p = math.exp(4) / (math.exp(4) + known_pairs.SIZE - 1)
    with capsys.disabled():
        print(
            f"\n  T={temperature:g}, {proposal}: accepted {took} of {found.counts.drafts}, expected "
            f"{expected:.1f} +- {variance**0.5:.1f}; successors {right} of {chances}, expected {p * chances:.1f}"
        )
    assert expected > 20
    assert abs(took - expected) < 4 * variance**0.5
    assert abs(right - p * chances) < 4 * (p * (1 - p) * chances) ** 0.5


def overlap(pair, module, tokens, temperature: float, proposal: str) -> float:
    """How likely the first drafted token after `tokens` is accepted."""
    step = pair.engine.session(known_pairs.AUX).forward(tokens)
    p = torch.softmax(step.logits[-1].double() / temperature, -1)
    drafter = ChainDrafter(module)
    drafter.extend(step.aux[:-1], torch.tensor(tokens[1:]))
    if proposal == "greedy":
        return float(p[drafter.propose(1)[0]])
    _, q = drafter.sample(1, temperature, torch.Generator().manual_seed(0))
    return float(torch.minimum(p, q[0]).sum())


def few_words(pair, prompts, num=4) -> DraftVocabulary:
    """The tokens that the verifier says most: so that a random draft is right now and then."""
    said = Counter(token for p in prompts for token in pair.engine.generate(p, 24))
    return DraftVocabulary.from_ids(sorted(t for t, _ in said.most_common(num)), pair.facts.vocab_size)


def test_both_back_ends_of_an_evaluation_count_alike(random, tmp_path):
    file = tmp_path / "prompts.jsonl"
    records = [{"id": w, "category": w[:1], "turns": [w]} for w in ("ab", "an apple", "two", "the sea")]
    file.write_text("".join(json.dumps(r) + "\n" for r in records))
    words = [[257, *b"user\n", *r["turns"][0].encode(), 258, 10, 257, *b"assistant\n"] for r in records]
    draft = tmp_path / "draft"
    export_draft(random.draft(seed=9, vocabulary=few_words(random, words)), draft, {})

    def evaluate(backend: Backend, **options):
        return evaluate_draft(
            draft=draft,
            model=ModelConfig(name="random", path=str(random.path)),
            hardware=HardwareConfig(name="cpu"),
            prompts=PromptsConfig(name="test", path=str(file)),
            decode=DecodeConfig(backend=backend, k=[3], max_new_tokens=24, **options),
            out=tmp_path / backend.value,
            console=Console(file=io.StringIO()),
        )

    served = evaluate(Backend.vllm, temperature=[0.0, 1.0], batch_sizes=[1, 3], untrained=True)
    reference = evaluate(Backend.hf, untrained=True)
    assert served.variant().overall == reference.variant().overall
    assert served.variant("untrained").overall == reference.variant("untrained").overall
    assert served.variant().overall.acceptance_length > 1
    for v in served.variants:
        assert [x.batch_size for x in v.speeds] == [1, 3]
        assert all(x.speed_ratio and x.speed_ratio > 0 for x in v.speeds)
        assert [x.num_identical for x in v.speeds] == ([None] * 2 if v.temperature else [4, 4])
    files = [json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("vllm", "hf")]
    ours, theirs = ({p["id"]: p for p in f["prompts"]} for f in files)
    for name, prompt in ours.items():
        assert prompt["plain"]["tokens"] == theirs[name]["plain"]["tokens"]
        greedy = [t for t in prompt["trials"] if t["variant"] == "trained" and t["temperature"] == 0]
        assert [t["batch_size"] for t in greedy] == [1, 3]
        for trial in greedy:
            assert trial["accepted_per_step"] == theirs[name]["trials"][0]["accepted_per_step"]
    assert files[0]["setup"]["backend"] == "vllm"
    assert files[0]["setup"]["num_late_steps"] == 0
    assert files[0]["setup"]["draft_vocabulary"] == files[1]["setup"]["draft_vocabulary"]


def test_a_verifier_that_cannot_be_split_is_refused_before_anything_starts(succ):
    with pytest.raises(UserError, match="4 attention heads cannot be split"):
        start(succ, None, 0, tensor_parallel=3)
