from __future__ import annotations

import pytest
import torch

from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.verifier.facts import read_facts

PROMPT = [5, 9, 33, 7, 2, 80, 41]


@pytest.fixture(scope="module")
def engine(llama):
    return HuggingFaceEngine(llama, read_facts(llama))


def test_greedy_generation_is_the_librarys_own(engine, llama, load_plain):
    model = load_plain(llama)
    model.generation_config.eos_token_id = 1
    want = model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        do_sample=False,
        max_new_tokens=20,
        pad_token_id=1,
    )[0, len(PROMPT) :].tolist()
    assert engine.generate(PROMPT, 20) == want


def test_generation_ends_with_the_end_token(engine, llama):
    free = engine.generate(PROMPT, 12)
    ending = HuggingFaceEngine(llama, read_facts(llama))
    object.__setattr__(ending.facts, "eos_token_ids", (free[5],))
    first = free.index(free[5])
    assert ending.generate(PROMPT, 12) == free[: first + 1]


def test_steps_give_the_states_and_logits_of_one_forward(engine, llama, load_plain):
    whole = engine.capture([PROMPT], (1, 3))[0]
    with torch.no_grad():
        logits = load_plain(llama)(torch.tensor([PROMPT])).logits[0]
    session = engine.session((1, 3))
    pieces = [session.forward(PROMPT[:3]), session.forward(PROMPT[3:4]), session.forward(PROMPT[4:])]
    torch.testing.assert_close(torch.cat([p.aux for p in pieces]), whole.aux, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([p.last for p in pieces]), whole.last, rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.cat([p.logits for p in pieces]), logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}]
)
def test_tokens_taken_back_leave_no_trace(make_model, changes):
    path = make_model("qwen3" if changes else "llama", **changes)
    engine = HuggingFaceEngine(path, read_facts(path))
    straight, winding = engine.session((2,)), engine.session((2,))
    want = [straight.forward(PROMPT), straight.forward([50, 51])][1]
    winding.forward(PROMPT)
    winding.forward([90, 91, 92])
    winding.crop(len(PROMPT))
    got = winding.forward([50, 51])
    torch.testing.assert_close(got.logits, want.logits, rtol=0, atol=1e-5)
    winding.crop(0)
    again = winding.forward(PROMPT)
    torch.testing.assert_close(again.logits, engine.session((2,)).forward(PROMPT).logits, rtol=0, atol=1e-5)


def test_only_the_logits_asked_for_are_returned(engine):
    session = engine.session((2,))
    step = session.forward(PROMPT, num_logits=1, states=False)
    assert step.logits.shape == (1, 96)
    assert step.aux is None
    assert session.length == len(PROMPT)
    with pytest.raises(ValueError, match="num_logits"):
        session.forward(PROMPT, num_logits=0)
    with pytest.raises(ValueError, match="crop"):
        session.crop(len(PROMPT) + 1)
