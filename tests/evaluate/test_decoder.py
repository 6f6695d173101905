from __future__ import annotations

from functools import partial

import pytest
import torch

from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.evaluate.acceptance import AcceptanceCounts, summarise
from eagle3lab.evaluate.decoder import decode_plain, decode_with_draft, first_difference, prefill

AUX = (2, 3, 5)
PROMPT = [10, 11, 30, 31, 5]


def decode(pair, draft, k, budget=40, prompt=PROMPT, end_ids=(1,)):
    session = pair.engine.session(AUX)
    start = prefill(session, prompt)
    plain = decode_plain(session, start, budget, end_ids)
    drafted = decode_with_draft(session, start, partial(ChainDrafter, draft), k, budget, end_ids)
    assert session.length == len(prompt)
    return session, start, plain, drafted


def test_a_draft_right_at_position_0_only_gives_exactly_2_tokens_per_step(succ_pair, one_right_draft):
    """The known-answer pair that vLLM measures as 80 drafts, [80, 0, 0] accepted, 2.0."""
    counts = AcceptanceCounts(0, (0, 0, 0))
    for first in (5, 9, 20, 33):
        _, _, plain, drafted = decode(succ_pair, one_right_draft, 3, budget=41, prompt=[7, first])
        assert drafted.tokens == plain.tokens
        counts += AcceptanceCounts.from_steps(drafted.accepted, 3)
    assert counts == AcceptanceCounts(80, (80, 0, 0))
    assert summarise([counts]).acceptance_length == 2.0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_perfect_draft_gives_k_plus_1_tokens_per_step(succ_pair, perfect_draft, k):
    _, _, plain, drafted = decode(succ_pair, perfect_draft, k, budget=1 + 6 * (k + 1))
    assert drafted.tokens == plain.tokens
    assert drafted.accepted == (k,) * 6
    assert drafted.num_cut == 0
    assert summarise([AcceptanceCounts.from_steps(drafted.accepted, k)]).acceptance_length == k + 1


def test_the_verifier_itself_counts_upwards(succ_pair, successor):
    _, _, plain, _ = decode(succ_pair, succ_pair.draft(), 3)
    want = [successor(PROMPT[-1])]
    while len(want) < 40:
        want.append(successor(want[-1]))
    assert list(plain.tokens) == want


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("budget", [1, 2, 7, 30])
def test_text_is_the_verifiers_own_whatever_the_draft(random_pair, k, budget):
    prompt = [257, 117, 10, 104, 105, 258, 10, 257, 97]
    want = random_pair.engine.generate(prompt, budget)
    for draft in (random_pair.draft(seed=3), random_pair.draft(seed=4, num_layers=2)):
        _, _, plain, drafted = decode(random_pair, draft, k, budget, prompt, random_pair.facts.eos_token_ids)
        assert list(plain.tokens) == want
        assert drafted.tokens == plain.tokens


def test_drafted_ids_of_a_pruned_vocabulary_are_verifier_ids(succ_pair, successor):
    """The draft knows even tokens only, so it is right exactly where token i is even."""
    vocabulary = DraftVocabulary.from_ids(range(0, 64, 2), 64)
    draft = succ_pair.draft(vocabulary=vocabulary)
    with torch.no_grad():
        draft.fc.weight.copy_(torch.cat([torch.eye(64) / 3] * 3, dim=1))
        draft.layers[0].self_attn.o_proj.weight.zero_()
        draft.layers[0].mlp.down_proj.weight.zero_()
        draft.lm_head.weight.zero_()
        for token in range(3, 64):
            after = successor(successor(token))
            if after % 2 == 0:
                draft.lm_head.weight[after // 2, token] = 5.0
    _, _, plain, drafted = decode(succ_pair, draft, 2, budget=20, prompt=[7, 9])
    assert drafted.tokens == plain.tokens
    assert set(drafted.accepted) == {0, 1}


def test_an_end_token_inside_a_step_ends_the_text_there(succ_pair, perfect_draft):
    _, _, plain, drafted = decode(succ_pair, perfect_draft, 4, end_ids=(13,))
    assert plain.tokens == (6, 7, 8, 9, 10, 11, 12, 13)
    assert drafted.tokens == plain.tokens
    assert drafted.accepted == (4, 4)  # the last step counts in full
    assert drafted.num_cut == 3


def test_a_budget_inside_a_step_cuts_the_text_there(succ_pair, perfect_draft):
    _, _, plain, drafted = decode(succ_pair, perfect_draft, 4, budget=8)
    assert drafted.tokens == plain.tokens
    assert len(drafted.tokens) == 8
    assert drafted.num_cut == 3


def test_equal_texts_have_no_difference(succ_pair, one_right_draft):
    session, start, plain, drafted = decode(succ_pair, one_right_draft, 3)
    assert first_difference(session, start, plain.tokens, drafted.tokens, 1e-4) is None


def test_a_difference_is_reported_with_its_logit_gap(random_pair):
    session, start, plain, _ = decode(random_pair, random_pair.draft(), 2, 6, PROMPT)
    with torch.no_grad():
        ids = torch.tensor([[*PROMPT, *plain.tokens[:2]]])
        logits = random_pair.engine.model(ids).logits[0, -1]
    other = (plain.tokens[2] + 1) % 264
    changed = (*plain.tokens[:2], other, *plain.tokens[3:])
    difference = first_difference(session, start, plain.tokens, changed, 1e-4)
    assert (difference.position, difference.plain, difference.drafted) == (2, plain.tokens[2], other)
    assert difference.logit_gap == pytest.approx(float(logits[plain.tokens[2]] - logits[other]), abs=1e-4)
    assert not difference.near_tie
    assert first_difference(session, start, plain.tokens, changed, 10.0).near_tie
    assert session.length == len(PROMPT)


def test_a_text_that_stops_early_is_a_difference_that_rounding_does_not_explain(random_pair):
    session, start, plain, _ = decode(random_pair, random_pair.draft(), 2, 6, PROMPT)
    difference = first_difference(session, start, plain.tokens, plain.tokens[:4], 10.0)
    assert (difference.position, difference.plain, difference.drafted) == (4, plain.tokens[4], None)
    assert not difference.near_tie
