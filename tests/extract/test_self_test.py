from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from eagle3lab.config.errors import IntegrityError
from eagle3lab.engines.base import States
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.extract.alignment import tolerance_for
from eagle3lab.extract.reference import reference_forward
from eagle3lab.extract.self_test import check_alignment, sample_indices, self_test_engine
from eagle3lab.verifier.facts import read_facts
from eagle3lab.verifier.weights import load_edge_weights

IDS = (2, 3, 4)
GENERATOR = torch.Generator().manual_seed(5)
ROWS = [torch.randint(2, 96, (n,), generator=GENERATOR).tolist() for n in (19, 41)]
DTYPES = [torch.float32, torch.bfloat16]


class Bench:
    """One verifier, its reference and its engine's states."""

    def __init__(self, path, rows=ROWS, ids=IDS):
        self.path, self.ids, self.facts = path, ids, read_facts(path)
        self.edge = load_edge_weights(self.facts, parts=("head", "norm"))
        self.references = reference_forward(path, self.facts, rows, dtype=torch.float32, device="cpu")
        self.engine = HuggingFaceEngine(path, self.facts)
        self.states = self.engine.capture(rows, ids)

    def check(self, samples, dtype=torch.float32, references=None):
        stored = [States(s.token_ids, s.aux.to(dtype), s.last.to(dtype)) for s in samples]
        return check_alignment(
            stored, references or self.references, self.ids, self.facts, self.edge,
            tolerance_for(torch.float32, dtype), where="the test", fix="type this",
        )  # fmt: skip

    def message(self, samples, dtype=torch.float32, references=None):
        with pytest.raises(IntegrityError) as caught:
            self.check(samples, dtype, references)
        text = str(caught.value)
        assert "alignment self-test failed for the test" in text
        assert "argmax agreement" in text  # the measured errors
        assert text.endswith("try: type this")
        return text


@pytest.fixture(scope="module")
def bench(llama):
    return Bench(llama)


def aux_of(states, columns):
    slots = states.aux.split(64, dim=-1)
    return replace(states, aux=torch.cat([slots[c] for c in columns], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_states_pass(bench, dtype):
    report = bench.check(bench.states, dtype)
    assert report.argmax_agreement == 1.0
    assert report.mean_kl < 1e-4
    assert report.tokens == 60
    assert set(report.aux_errors) == set(IDS)


def test_an_engine_is_tested_as_one_batch(bench):
    report = self_test_engine(
        bench.engine, bench.references, IDS, bench.facts, bench.edge,
        compute_dtype=torch.float32, store_dtype=torch.bfloat16,
    )  # fmt: skip
    assert report.passed
    assert "2 rows, 60 tokens" in str(report)


@pytest.mark.parametrize("dtype", DTYPES)
def test_aux_layers_one_too_high_are_named(bench, dtype):
    message = bench.message(bench.engine.capture(ROWS, [k + 1 for k in IDS]), dtype)
    assert "every aux slot is +1 layer off" in message
    assert re.search(r"slot 0 \(id 2\) holds layer 3 \(error [\d.]+ as 2, [\d.e-]+ as 3\)", message)


def test_one_wrong_aux_layer_is_named(bench):
    message = bench.message(bench.engine.capture(ROWS, (2, 3, 5)))
    assert "slot 2 (id 4) holds layer 5" in message
    assert "slot 0" not in message


def test_an_aux_slot_that_holds_the_last_layer_is_named(bench):
    assert "slot 1 (id 3) holds layer 6" in bench.message(bench.engine.capture(ROWS, (2, 6, 4)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_swapped_layers_are_named(bench, dtype):
    message = bench.message([aux_of(s, (1, 0, 2)) for s in bench.states], dtype)
    assert "aux slots are swapped: slot 0 (id 2) holds layer 3" in message
    assert "slot 1 (id 3) holds layer 2" in message


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_post_norm_last_state_is_named(bench, dtype):
    with torch.no_grad():
        faulty = [replace(s, last=bench.engine._inner.norm(s.last)) for s in bench.states]
    assert "the last state is post-norm" in bench.message(faulty, dtype)


def test_a_post_norm_last_state_is_named_where_the_norm_weight_is_one(make_model):
    bench = Bench(make_model(seed=4, unit_norms=True))
    with torch.no_grad():
        faulty = [replace(s, last=bench.engine._inner.norm(s.last)) for s in bench.states]
    assert "the last state is post-norm" in bench.message(faulty)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, -1])
def test_states_shifted_by_one_token_are_named(bench, dtype, shift):
    faulty = [replace(s, aux=s.aux.roll(-shift, 0), last=s.last.roll(-shift, 0)) for s in bench.states]
    message = bench.message(faulty, dtype)
    assert (
        f"shifted by one against each other: the states at position i belong to token i{shift:+d}" in message
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shift", [1, -1])
def test_token_ids_shifted_by_one_are_named(bench, dtype, shift):
    shifted = [row[shift:] + row[:shift] for row in ROWS]  # +1: the next token's id was written
    references = reference_forward(bench.path, bench.facts, shifted, dtype=torch.float32, device="cpu")
    message = bench.message(bench.states, dtype, references)
    assert (
        f"shifted by one against each other: the states at position i belong to token i{-shift:+d}" in message
    )


def test_token_ids_that_lost_their_first_are_named(bench):
    shifted = [[*row[1:], 7] for row in ROWS]
    references = reference_forward(bench.path, bench.facts, shifted, dtype=torch.float32, device="cpu")
    assert "the states at position i belong to token i-1" in bench.message(
        bench.states, references=references
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_checkpoint_of_the_same_shape_is_named(bench, make_model, dtype):
    other = Bench(make_model(seed=1))
    assert "another checkpoint of the same shape" in bench.message(other.states, dtype)


def test_a_fine_tune_of_the_checkpoint_is_named(bench, make_model):
    path = make_model(seed=0)
    engine = HuggingFaceEngine(path, bench.facts)
    with torch.no_grad():
        for parameter in engine.model.parameters():
            parameter += 0.01 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    message = bench.message(engine.capture(ROWS, IDS))
    assert "another checkpoint of the same family" in message


def test_a_scale_that_was_not_undone_is_named(bench):
    assert "scaled by 0.5" in bench.message(
        [replace(s, aux=s.aux / 2, last=s.last / 2) for s in bench.states]
    )


def test_damage_in_one_slot_is_named(bench):
    noise = torch.randn(41, 64, generator=torch.Generator().manual_seed(0))
    faulty = [replace(s, aux=torch.cat([s.aux[:, :128], noise[: len(s.aux)]], -1)) for s in bench.states]
    assert "layer 4: no layer or token fits, while the other slots are right" in bench.message(faulty)


def test_a_few_tokens_with_states_of_others_are_named(bench):
    faulty = bench.states[1]
    aux = faulty.aux.clone()
    aux[-3:] = faulty.aux[:3]
    message = bench.message([bench.states[0], replace(faulty, aux=aux)])
    assert "3 of 60 tokens hold other states while the rest is right" in message
    assert "row 1, token 38" in message


def test_a_head_that_was_read_wrongly_is_named(bench):
    head = bench.edge.head.flip(0)
    with pytest.raises(IntegrityError, match="the states are right but final norm \\+ head do not"):
        check_alignment(
            bench.states, bench.references, IDS, bench.facts, replace(bench.edge, head=head),
            tolerance_for(torch.float32, torch.float32), where="the test", fix="type this",
        )  # fmt: skip


def test_samples_spread_over_the_lengths_and_skip_single_tokens():
    assert sample_indices([1, 50, 7, 30, 9], 2) == [2, 1]
    assert sample_indices([1, 50, 7, 9, 30, 20], 3) == [2, 5, 1]
    assert sample_indices([4], 3) == [0]
    assert sample_indices([1, 1], 1) == [0]
