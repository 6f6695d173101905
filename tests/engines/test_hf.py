from __future__ import annotations

import json

import pytest
import torch

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.engines.base import States, check_states
from eagle3lab.engines.hf import HuggingFaceEngine
from eagle3lab.verifier.facts import read_facts

ROWS = [[2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [40, 41, 42], [7], [60, 5, 60, 5, 60, 5, 60]]


@pytest.fixture(scope="module")
def engine(llama):
    return HuggingFaceEngine(llama, read_facts(llama))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_captured_layers_are_the_reference_hidden_states(make_model, load_plain, kind):
    path = make_model(kind)
    reference = load_plain(path)
    states = HuggingFaceEngine(path, read_facts(path)).capture(ROWS[:1], (1, 3, 4))[0]
    with torch.no_grad():
        out = reference(torch.tensor(ROWS[:1]), output_hidden_states=True)
    slots = states.aux.split(64, dim=-1)
    for slot, layer_id in zip(slots, (1, 3, 4), strict=True):
        torch.testing.assert_close(slot, out.hidden_states[layer_id][0], rtol=0, atol=1e-5)
    with torch.no_grad():
        logits = reference.lm_head(reference.model.norm(states.last))
    torch.testing.assert_close(logits, out.logits[0], rtol=0, atol=1e-5)


def test_the_last_state_is_before_the_final_norm(engine, llama, load_plain):
    states = engine.capture(ROWS[:1], (2,))[0]
    with torch.no_grad():
        post_norm = load_plain(llama)(torch.tensor(ROWS[:1]), output_hidden_states=True).hidden_states[-1][0]
    assert (states.last - post_norm).norm() > 0.1 * post_norm.norm()


def test_a_padded_batch_gives_the_states_of_single_rows(engine):
    batch = engine.capture(ROWS, (1, 2, 4))
    for states, row in zip(batch, ROWS, strict=True):
        alone = engine.capture([row], (1, 2, 4))[0]
        assert states.token_ids.tolist() == row
        torch.testing.assert_close(states.aux, alone.aux, rtol=0, atol=1e-5)
        torch.testing.assert_close(states.last, alone.last, rtol=0, atol=1e-5)


def test_slots_follow_the_order_asked_for(engine):
    forward, backward = engine.capture(ROWS[:1], (1, 4))[0], engine.capture(ROWS[:1], (4, 1))[0]
    assert torch.equal(forward.aux, torch.cat(backward.aux.split(64, dim=-1)[::-1], dim=-1))


def test_states_are_copies_that_a_second_call_leaves_alone(engine):
    first = engine.capture(ROWS, (1, 2))
    kept = [s.aux.clone() for s in first]
    engine.capture([row[::-1] for row in ROWS], (1, 2))
    assert all(torch.equal(s.aux, k) for s, k in zip(first, kept, strict=True))
    pointers = {t.untyped_storage().data_ptr() for s in first for t in (s.aux, s.last, s.token_ids)}
    assert len(pointers) == 3 * len(ROWS)
    assert not any(s.aux.is_inference() or s.last.is_inference() for s in first)


def test_the_same_call_twice_is_identical(engine):
    first, second = engine.capture(ROWS, (1, 3)), engine.capture(ROWS, (1, 3))
    assert all(
        torch.equal(a.aux, b.aux) and torch.equal(a.last, b.last) for a, b in zip(first, second, strict=True)
    )


def test_layers_that_return_tuples_are_captured_too(llama):
    engine = HuggingFaceEngine(llama, read_facts(llama))
    plain = engine.capture(ROWS[:2], (2, 4))
    inner, layers = engine._inner, engine._layers
    for layer in layers:
        layer.register_forward_hook(lambda _m, _a, output: (output, None))
        layer.register_forward_pre_hook(
            lambda _m, args: (args[0][0] if isinstance(args[0], tuple) else args[0],)
        )
    inner.norm.register_forward_pre_hook(
        lambda _m, args: (args[0][0] if isinstance(args[0], tuple) else args[0],)
    )
    for a, b in zip(plain, engine.capture(ROWS[:2], (2, 4)), strict=True):
        assert torch.equal(a.aux, b.aux)
        assert torch.equal(a.last, b.last)


def test_the_head_is_not_run_while_capturing(engine):
    def fail(*_):
        raise AssertionError("the head ran")

    handle = engine.model.lm_head.register_forward_pre_hook(fail)
    try:
        engine.capture(ROWS, (1, 2))
    finally:
        handle.remove()


def test_no_hook_is_left_behind(engine):
    engine.capture(ROWS, (1, 2))
    assert not any(m._forward_hooks for m in engine.model.modules())


@pytest.mark.parametrize(
    ("rows", "layer_ids"),
    [([], (1,)), ([[]], (1,)), ([[96]], (1,)), ([[-1]], (1,)), ([[1]], (0,)), ([[1]], (6,))],
)
def test_impossible_requests_are_refused(engine, rows, layer_ids):
    with pytest.raises(ValueError, match=r"row|ids"):
        engine.capture(rows, layer_ids)


def test_a_checkpoint_without_all_weights_is_refused(make_model, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_model("llama", seed=3)
    weights = load_file(path / "model.safetensors")
    weights.pop("model.layers.2.mlp.up_proj.weight")
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=r"lacks 1 weights.*up_proj"):
        HuggingFaceEngine(path, read_facts(path))


def test_weights_of_another_shape_or_with_a_damaged_header_are_refused(make_model, tmp_path):
    from safetensors.torch import load_file, save_file

    path = make_model("llama", seed=5)
    facts, file = read_facts(path), path / "model.safetensors"
    weights = load_file(file)
    name = "model.layers.2.mlp.up_proj.weight"
    weights[name] = torch.cat([weights[name], weights[name][:1]])
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(IntegrityError, match=rf"another shape: \['{name}'\]"):
        HuggingFaceEngine(path, facts)
    file.write_bytes(file.read_bytes().replace(b'"F32"', b'"F64"', 1))
    with pytest.raises(IntegrityError, match=r"holds a damaged safetensors file"):
        HuggingFaceEngine(path, facts)


UNKNOWN, WRONG_KIND = r"'no_such'\)", r".*(hidden_act|'int' object)"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"hidden_act": "no_such"}, UNKNOWN),
        ({"rope_parameters": {"rope_type": "no_such", "rope_theta": 1e4}}, UNKNOWN),
        ({"hidden_act": 5}, WRONG_KIND),
        ({"layer_types": 5}, WRONG_KIND),
        ({"quantization_config": 5}, WRONG_KIND),
    ],
)
def test_what_transformers_does_not_take_is_a_user_error(make_model, changed, reason):
    path = make_model("llama", seed=6)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(UserError, match=rf"could not be loaded by transformers \({reason}"):
        HuggingFaceEngine(path, read_facts(path))


def test_a_directory_that_is_no_model_is_a_user_error(llama, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "no-such-model"}')
    with pytest.raises(UserError, match=r"could not be loaded"):
        HuggingFaceEngine(tmp_path, read_facts(llama))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: States(s.token_ids[:-1], s.aux, s.last), "other token ids"),
        (lambda s: States(s.token_ids, s.aux[:, :64], s.last), "aux states of another shape"),
        (lambda s: States(s.token_ids, s.aux[:-2], s.last), "aux states of another shape"),
        (lambda s: States(s.token_ids, s.aux, s.last * float("nan")), "last states with NaN"),
        (lambda s: States(s.token_ids, s.aux * 0, s.last), "all zero"),
    ],
)
def test_a_backends_answer_is_held_against_the_request(engine, change, message):
    states = engine.capture(ROWS[:1], (1, 2))[0]
    check_states(states, ROWS[0], 2, 64)
    with pytest.raises(IntegrityError, match=message):
        check_states(change(states), ROWS[0], 2, 64)
