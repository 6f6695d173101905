"""Answers by sampling, with Hugging Face: against transformers' own greedy decoding and odds worked out by hand."""

from __future__ import annotations

import pytest
import torch

from eagle3lab.engines.base import Sampling
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.engines.sampling import draw
from eagle3lab.verifier.facts import read_facts

PROMPTS = [[2, 3, 4, 5, 6, 7], [40, 41, 42], [7], [60, 5, 60, 5]]
DRAWN = Sampling(temperature=1.0, top_p=0.9, top_k=0, stop_token_ids=(1,))
GREEDY = Sampling(temperature=0.0, top_p=1.0, top_k=0, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def engine(llama):
    return HuggingFaceEngine(llama, read_facts(llama))


def test_greedy_answers_are_those_of_transformers_own_decoding(engine, llama, load_plain):
    answers = engine.answer(PROMPTS, GREEDY, [0] * 4, [12] * 4)
    plain = load_plain(llama)
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        wanted = plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, pad_token_id=1
        )[0, len(prompt) :].tolist()
        assert list(answer.token_ids) == wanted
        assert answer.ended == (wanted[-1] == 1)


def test_an_answer_depends_on_its_seed_and_not_on_its_neighbours(engine):
    together = engine.answer(PROMPTS, DRAWN, [11, 12, 13, 14], [10, 9, 8, 7])
    alone = [
        engine.answer([prompt], DRAWN, [seed], [new])[0]
        for prompt, seed, new in zip(PROMPTS, [11, 12, 13, 14], [10, 9, 8, 7], strict=True)
    ]
    assert together == alone
    others = engine.answer(PROMPTS, DRAWN, [21, 22, 23, 24], [10, 9, 8, 7])
    assert all(a.token_ids != b.token_ids for a, b in zip(together, others, strict=True))


def test_an_answer_ends_with_the_first_stop_token_and_keeps_it(engine):
    (whole,) = engine.answer([PROMPTS[0]], DRAWN, [5], [30])
    stop = whole.token_ids[4]
    (ended,) = engine.answer([PROMPTS[0]], Sampling(1.0, 0.9, 0, (stop,)), [5], [30])
    assert ended.ended
    assert ended.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert not engine.answer([PROMPTS[0]], DRAWN, [5], [4])[0].ended


@pytest.mark.parametrize(("prompt", "new"), [([], 3), ([2] * 250, 7)])
def test_a_prompt_without_tokens_or_without_room_is_refused(engine, prompt, new):
    with pytest.raises(ValueError, match="positions"):
        engine.answer([prompt], DRAWN, [0], [new])


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.7, 1.0, 3), (1.0, 0.8, 0), (2.0, 0.6, 5)]
)
def test_tokens_are_drawn_with_the_probabilities_that_sampling_gives_them(temperature, top_p, top_k):
    logits = torch.tensor([2.0, -1.0, 1.5, 0.3, -4.0, 1.9, 0.0])
    weights = {i: float(torch.exp(torch.tensor(x / temperature))) for i, x in enumerate(logits.tolist())}
    likeliest = sorted(weights, key=lambda i: -weights[i])[: top_k or None]
    kept, mass = [], 0.0
    for i in likeliest:  # the smallest set that reaches top_p, of what top_k left
        if mass < top_p:
            kept.append(i)
        mass += weights[i] / sum(weights[j] for j in likeliest)
    generator = torch.Generator().manual_seed(0)
    sampling = Sampling(temperature, top_p, top_k, ())
    counts = torch.bincount(
        torch.tensor([draw(logits, sampling, generator) for _ in range(6000)]), minlength=7
    )
    wanted = torch.tensor([weights[i] if i in kept else 0.0 for i in range(7)])
    assert not counts[wanted == 0].any()
    torch.testing.assert_close(counts / 6000, wanted / wanted.sum(), rtol=0, atol=0.025)
