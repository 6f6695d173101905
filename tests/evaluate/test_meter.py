"""The meter gives known answers, for the weights it is handed, and leaves everything else as it was."""

from __future__ import annotations

import json
import random

import pytest
import torch

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import Accelerator, HardwareConfig, ModelConfig
from eagle3lab.config.selection import AcceptanceConfig
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.evaluate.acceptance import AcceptanceCounts
from eagle3lab.evaluate.decoder import decode_with_draft, prefill
from eagle3lab.evaluate.meter import DraftMeter, open_meter
from eagle3lab.store.trained_on import TRAINED_ON_FILE, trained_on, write_trained_on

PROMPTS = ((5, 6, 7), (40, 41), (20, 21, 22, 23))


def trained_weights(draft):
    return {name: p.detach().clone() for name, p in draft.named_parameters() if p.requires_grad}


def meter_of(pair, draft, prompts=PROMPTS, k=3):
    return DraftMeter(pair.engine, draft, prompts, k, 24, frozenset({1}), "")


def test_one_right_token_a_step_is_exactly_two_tokens_a_step(succ_pair, one_right_draft):
    steps, accepted = meter_of(succ_pair, one_right_draft).measure(trained_weights(one_right_draft))
    assert accepted == (steps, 0, 0)
    assert steps > 0


def test_a_perfect_draft_has_every_token_accepted(succ_pair, perfect_draft):
    steps, accepted = meter_of(succ_pair, perfect_draft).measure(trained_weights(perfect_draft))
    assert accepted == (steps, steps, steps)


def test_it_is_the_weights_handed_over_that_are_measured_every_time(succ_pair, one_right_draft):
    right = trained_weights(one_right_draft)
    wrong = {name: -tensor for name, tensor in right.items()}
    meter = meter_of(succ_pair, one_right_draft)
    first = meter.measure(right)
    steps, accepted = meter.measure(wrong)
    assert accepted[0] < steps
    assert meter.measure(right) == first


@pytest.fixture
def file_of(tmp_path):
    def write(*texts):
        path = tmp_path / "prompts.jsonl"
        path.write_text("".join(json.dumps({"id": t[:8], "turns": [t]}) + "\n" for t in texts))
        return AcceptanceConfig(every_updates=5, k=3, max_new_tokens=16, prompts=str(path))

    return write


class Store:
    """What of a store is asked when the prompts come from a file."""

    def __init__(self, path):
        self.path = path


def opened(pair, settings, store, draft):
    return open_meter(
        settings,
        model=ModelConfig(name="random", path=str(pair.path)),
        hardware=HardwareConfig(name="cpu", accelerator=Accelerator.cpu),
        facts=pair.facts,
        store=store,
        draft=draft,
        ttt_steps=2,
    )


def test_opening_and_measuring_draw_no_random_number(random_pair, file_of, tmp_path):
    torch.manual_seed(3)
    before = torch.get_rng_state(), random.getstate()
    draft = random_pair.draft(seed=9)
    meter = opened(random_pair, file_of("hello", "2+2"), Store(tmp_path), draft)
    meter.measure(trained_weights(draft))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


def test_prompts_of_a_file_are_rendered_as_served_and_decoded_as_by_the_decoder(
    random_pair, file_of, tmp_path
):
    draft = random_pair.draft(seed=9)
    meter = opened(random_pair, file_of("hello", "2+2"), Store(tmp_path), draft)
    text = b"user\n2+2"
    assert bytes(t for t in meter.prompts[1] if t < 256).startswith(text)
    total = AcceptanceCounts(0, (0, 0, 0))
    engine = HuggingFaceEngine(random_pair.path, random_pair.facts)
    from eagle3lab.draft.inference import ChainDrafter

    for prompt in meter.prompts:
        session = engine.session((2, 3, 5))
        decoded = decode_with_draft(
            session, prefill(session, prompt), lambda: ChainDrafter(draft), 3, 16, meter.end_ids
        )
        total += AcceptanceCounts.from_steps(decoded.accepted, 3)
    assert meter.measure(trained_weights(draft)) == (total.drafts, total.accepted_at)
    assert "2 prompts" in meter.description
    assert "could not be checked" in meter.description


def test_prompts_too_long_or_trained_on_are_left_out_and_counted(random_pair, file_of, tmp_path):
    first = opened(random_pair, file_of("hello", "2+2"), Store(tmp_path), random_pair.draft())

    class Row:
        row_id = conversation_id = source = "row"
        split = "train"
        input_ids = (*first.prompts[0], 65)
        loss_mask = (*[0] * len(first.prompts[0]), 1)

    write_trained_on(tmp_path / TRAINED_ON_FILE, trained_on([Row()], []))
    settings = file_of("hello", "2+2", "x" * 200)
    meter = opened(random_pair, settings, Store(tmp_path), random_pair.draft())
    assert meter.prompts == first.prompts[1:]
    assert "1 of 3 prompts are left out: the draft was trained on them" in meter.description
    assert "1 prompts of more than" in meter.description
    with pytest.raises(UserError, match="was trained on 1 of the 1 prompts"):
        opened(random_pair, file_of("hello"), Store(tmp_path), random_pair.draft())
    with pytest.raises(UserError, match=r"train\.acceptance\.prompts=FILE"):
        opened(random_pair, file_of("x" * 200), Store(tmp_path), random_pair.draft())
