"""Rejection sampling against the verifier's own distribution, worked out by hand."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
import torch

from eagle3lab.config.schema import Proposal
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.evaluate.decoder import Prefill, decode_plain, decode_with_draft
from eagle3lab.evaluate.rules import GreedyRule, SamplingRule, make_rule

V, LENGTH, SAMPLES = 4, 3, 6000
# p(next | last) and q(next | last); the draft has no word for token 3, and one row is the verifier's own
P = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.3, 0.5], [0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]])
Q = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.3, 0.3, 0.4, 0.0], [0.25, 0.25, 0.5, 0.0], [0.9, 0.05, 0.05, 0.0]])


class MarkovSession:
    """A verifier whose next token depends on the last one alone."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table
        self.length = 1

    def forward(self, tokens, *, num_logits=None, states=True):
        from eagle3lab.engines.session import SessionStep

        self.length += len(tokens)
        return SessionStep(self.table[list(tokens)].log(), torch.zeros(len(tokens), 1), None)

    def crop(self, length: int) -> None:
        self.length = length


class MarkovDrafter:
    """Drafts by a table; the state it needs is the last verified token."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table = table

    def extend(self, aux, tokens):
        self.last = int(tokens[-1])

    def propose(self, num_tokens):
        chain = [self.last]
        for _ in range(num_tokens):
            chain.append(int(self.table[chain[-1]].argmax()))
        return chain[1:]

    def sample(self, num_tokens, temperature, generator):
        chain, rows = [self.last], []
        for _ in range(num_tokens):
            rows.append(torch.softmax(self.table[chain[-1]].double().log() / temperature, dim=-1))
            chain.append(int(torch.multinomial(rows[-1], 1, generator=generator)))
        return chain[1:], torch.stack(rows)


def warmed(table: torch.Tensor, temperature: float) -> torch.Tensor:
    powers = table.double() ** (1 / temperature)
    return powers / powers.sum(-1, keepdim=True)


def p_value(counts: Counter, temperature: float, num: int) -> float:
    """Pearson's chi-square of whole texts against the product of the verifier's probabilities."""
    p = warmed(P, temperature)
    statistic = 0.0
    for text in itertools.product(range(V), repeat=LENGTH):
        chance, last = 1.0, 0
        for token in text:
            chance, last = chance * float(p[last, token]), token
        statistic += (counts[text] - num * chance) ** 2 / (num * chance)
    freedom = torch.tensor((V**LENGTH - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


def texts(temperature: float, proposal: Proposal | None, k: int = 2, table: torch.Tensor = Q) -> Counter:
    found: Counter = Counter()
    start = Prefill((0,), P[0].log(), torch.zeros(1, 1))
    for seed in range(SAMPLES):
        session = MarkovSession(P)
        rule = make_rule(temperature, proposal or Proposal.greedy, seed)
        if proposal is None:
            decoded = decode_plain(session, start, LENGTH, (), rule)
        else:
            decoded = decode_with_draft(session, start, lambda: MarkovDrafter(table), k, LENGTH, (), rule)
        found[decoded.tokens] += 1
    return found


@pytest.mark.parametrize("proposal", [None, Proposal.greedy, Proposal.probabilistic])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampled_texts_have_the_verifiers_distribution_whatever_is_drafted(temperature, proposal):
    assert p_value(texts(temperature, proposal), temperature, SAMPLES) > 1e-3


def test_the_test_of_the_distribution_sees_a_wrong_rule(monkeypatch):
    """Without the correction of rejected tokens (a draw from p in place of p - q) the texts are the draft's too."""
    monkeypatch.setattr(
        SamplingRule,
        "verify",
        lambda self, logits, drafted, proposals: (
            [drafted[0], self._draw(torch.softmax(logits[1].double(), -1))]
            if float(torch.rand((), generator=self._generator)) < 0.5
            else [self._draw(torch.softmax(logits[0].double(), -1))]
        ),
    )
    assert p_value(texts(1.0, Proposal.probabilistic), 1.0, SAMPLES) < 1e-6


@pytest.mark.parametrize(
    ("proposal", "want"),
    [
        # sum over x of min(p, q), from token 0 on; and p of the draft's likeliest token
        (Proposal.probabilistic, float(torch.minimum(P[0], Q[0]).sum())),
        (Proposal.greedy, float(P[0, 1])),
    ],
)
def test_a_drafted_token_is_accepted_as_often_as_the_two_distributions_overlap(proposal, want):
    accepted, num = 0, 4000
    for seed in range(num):
        rule = make_rule(1.0, proposal, seed)
        drafter = MarkovDrafter(Q)
        drafter.extend(None, [0])
        drafted, proposals = rule.propose(drafter, 1)
        accepted += len(rule.verify(P[[0, 1]].log(), drafted, proposals)) - 1
    assert abs(accepted / num - want) < 4 * (want * (1 - want) / num) ** 0.5


def test_a_draft_equal_to_the_verifier_is_always_accepted():
    for seed in range(200):
        rule = make_rule(1.0, Proposal.probabilistic, seed)
        drafter = MarkovDrafter(P)
        drafter.extend(None, [0])
        drafted, proposals = rule.propose(drafter, 3)
        logits = P[[0, *drafted]].log()
        assert rule.verify(logits, drafted, proposals)[:3] == drafted


def test_a_token_that_the_verifier_never_says_is_never_accepted():
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]] * 2).log()
    for seed in range(50):
        emitted = make_rule(1.0, Proposal.greedy, seed).verify(p, [3], None)
        assert len(emitted) == 1
        assert emitted[0] in (0, 1)


def test_the_same_seed_draws_the_same_text_and_temperature_0_draws_nothing():
    start = Prefill((0,), P[0].log(), torch.zeros(1, 1))
    once = [
        decode_with_draft(
            MarkovSession(P),
            start,
            lambda: MarkovDrafter(Q),
            2,
            8,
            (),
            make_rule(1.0, Proposal.probabilistic, 5),
        ).tokens
        for _ in range(2)
    ]
    assert once[0] == once[1]
    assert isinstance(make_rule(0.0, Proposal.probabilistic, 5), GreedyRule)


@pytest.mark.parametrize("pruned", [False, True])
def test_sampled_chains_are_drawn_from_what_they_say(random_pair, pruned):
    """Of a pruned vocabulary: verifier ids, and nothing where the draft has no word."""
    vocabulary = DraftVocabulary.from_ids(range(0, 264, 3), 264) if pruned else None
    drafter = ChainDrafter(random_pair.draft(seed=3, vocabulary=vocabulary))
    g = torch.Generator().manual_seed(0)
    drafter.extend(torch.randn(4, 192, generator=g), torch.tensor([5, 6, 7, 9]))
    chain, proposals = drafter.sample(3, 0.8, g)
    assert proposals.shape == (3, 264)
    assert torch.allclose(proposals.sum(-1), torch.ones(3, dtype=torch.float64))
    if pruned:
        assert all(token % 3 == 0 for token in chain)
        assert not proposals[:, torch.arange(264) % 3 != 0].any()
    greedy, logits = drafter.propose_with_logits(1)
    assert int(proposals[0].argmax()) == greedy[0]  # the first step stands on the same state
    want = torch.softmax(logits[0].double() / 0.8, -1)
    assert torch.allclose(proposals[0][proposals[0] > 0], want, atol=1e-9)
    counts = Counter(drafter.sample(1, 0.8, g)[0][0] for _ in range(3000))
    likeliest = greedy[0]
    chance = float(proposals[0, likeliest])
    assert abs(counts[likeliest] / 3000 - chance) < 4 * (chance * (1 - chance) / 3000) ** 0.5 + 1e-9
