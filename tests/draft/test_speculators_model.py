from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from eagle3lab.config.errors import UserError
from eagle3lab.config.plan_sizes import draft_size
from eagle3lab.config.schema import DraftConfig, HeadStart, LayerType, Shapes
from eagle3lab.draft import speculators_model
from eagle3lab.draft.format import all_finite
from eagle3lab.draft.speculators_model import (
    build_draft,
    required_symbols,
    vocabulary_of,
)
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.verifier.facts import VerifierFacts
from eagle3lab.verifier.weights import EdgeWeights


def build(facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary, **kw: Any) -> Any:
    seed, ids = kw.pop("seed", 0), kw.pop("ids", (2, 4, 5))
    cfg = DraftConfig(name="t", **kw)
    return build_draft(cfg, facts, edge, vocabulary, ids, attention="sdpa", seed=seed)


def test_frozen_tensors_are_the_verifiers(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    model = build(facts, edge, vocabulary)
    rows = edge.head[vocabulary.verifier_ids]
    assert torch.equal(model.embed_tokens.weight, edge.embedding)
    assert torch.equal(model.lm_head.weight, rows)
    assert torch.equal(model.verifier_lm_head.weight, rows)
    assert torch.equal(model.verifier_norm.weight, edge.norm)
    frozen = {n for n, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


@pytest.mark.parametrize("layer_type", list(LayerType))
def test_the_layer_has_the_verifiers_geometry(
    layer_type: LayerType, facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
        "partial_rotary_factor": 0.5,
    }
    facts = dataclasses.replace(facts, rope_parameters=rope)
    model = build(facts, edge, vocabulary, layer_type=layer_type, num_layers=2, sliding_window=8)
    layer = model.config.transformer_layer_config
    assert (layer.rms_norm_eps, layer.max_position_embeddings) == (1e-5, 512)
    assert layer.rope_parameters == {k: v for k, v in rope.items() if k != "partial_rotary_factor"}
    assert rope["partial_rotary_factor"] == 0.5
    assert model.layers[0].norm_before_residual is True
    assert model.sliding_window == 8
    assert model.sliding_window_indices == [0, 1]
    assert hasattr(model.layers[1].self_attn, "q_norm") == (layer_type is LayerType.qwen3)
    assert list(model.target_layer_ids) == [2, 4, 5]


def test_the_seed_alone_decides_the_trainable_weights_and_the_global_generator_is_untouched(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    first = build(facts, edge, vocabulary, seed=3)
    assert torch.equal(before, torch.random.get_rng_state())
    torch.manual_seed(8)
    wider = build(facts, edge, DraftVocabulary.full(facts.vocab_size), seed=3)
    other = build(facts, edge, vocabulary, seed=4)
    for name, parameter in first.named_parameters():
        if parameter.requires_grad:
            assert torch.equal(parameter, wider.get_parameter(name)), name
            assert torch.equal(parameter, other.get_parameter(name)) == (parameter.ndim == 1), name
    std = float(first.fc.weight.detach().std())
    assert 0.018 < std < 0.022


def test_a_full_vocabulary_has_no_maps_and_reads_back_as_full(
    facts: VerifierFacts, edge: EdgeWeights
) -> None:
    model = build(facts, edge, DraftVocabulary.full(facts.vocab_size))
    assert model.t2d is None
    assert vocabulary_of(model).is_full
    assert torch.equal(model.lm_head.weight, edge.head)


def test_other_than_three_aux_layers_are_named_for_the_engine(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    model = build(facts, edge, vocabulary, ids=(1, 2, 4, 5))
    assert model.fc.in_features == 4 * facts.hidden_size
    assert model.config.transformer_layer_config.num_aux_hidden_states == 4
    assert not hasattr(
        build(facts, edge, vocabulary).config.transformer_layer_config, "num_aux_hidden_states"
    )


def test_every_impossible_size_is_named_at_once(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    with pytest.raises(UserError) as caught:
        build(
            facts,
            edge,
            vocabulary,
            num_heads=3,
            num_kv_heads=2,
            head_dim=15,
            norm_before_fc=True,
            fc_norm=True,
        )
    text = str(caught.value)
    for name in ("draft.num_kv_heads", "draft.head_dim", "draft.num_heads", "draft.fc_norm"):
        assert name in text


@pytest.mark.parametrize(("layer_type", "num_heads"), [(LayerType.llama, 4), (LayerType.qwen3, 6)])
def test_heads_that_a_llama_layer_cannot_have_are_fewer_in_plan_and_draft(
    layer_type: LayerType,
    num_heads: int,
    facts: VerifierFacts,
    edge: EdgeWeights,
    vocabulary: DraftVocabulary,
) -> None:
    """As of GLM-4.5-Air, whose 96 heads do not divide 4096."""
    wide = dataclasses.replace(facts, num_heads=6, num_kv_heads=2)
    model = build(wide, edge, vocabulary, layer_type=layer_type)
    assert model.config.transformer_layer_config.num_attention_heads == num_heads
    head_norms = [n for n in ("q_norm", "k_norm") if layer_type is LayerType.qwen3]  # of no plan: few weights
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad) - len(head_norms) * wide.head_dim
    shapes = Shapes(**{f.name: getattr(wide, f.name, None) for f in dataclasses.fields(Shapes)})
    cfg = DraftConfig(name="t", layer_type=layer_type, vocab_size=vocabulary.size)
    assert draft_size(cfg, shapes, num_aux=3).trainable == counted
    with pytest.raises(UserError, match=r"draft.num_heads does not divide"):
        build(wide, edge, vocabulary, num_heads=6)


@pytest.mark.parametrize(
    ("rope", "says", "fix"),
    [
        (
            {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            "4 factors",
            "head_dim=8",
        ),
        ({"rope_type": "ntk", "factor": 2.0}, "ntk", ""),
        ({"rope_type": "yarn"}, "factor", ""),
        ({"rope_type": "linear", "factor": "8"}, "TypeError", ""),
    ],
    ids=["factors of a partial rotation", "unknown", "without a key", "text"],
)
def test_a_rotary_embedding_that_no_draft_can_have_is_one_message(
    rope: dict[str, Any],
    says: str,
    fix: str,
    facts: VerifierFacts,
    edge: EdgeWeights,
    vocabulary: DraftVocabulary,
) -> None:
    other = dataclasses.replace(facts, rope_parameters={**rope, "rope_theta": 10000.0})
    with pytest.raises(UserError, match=says) as caught:
        build(other, edge, vocabulary)
    assert "verifier's rotary embedding" in str(caught.value)
    assert fix in str(caught.value)


def test_a_stretch_that_only_the_engine_would_make_is_not_in_the_drafts_file(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    rope = {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0, "rope_theta": 10000.0}
    model = build(dataclasses.replace(facts, rope_parameters=rope), edge, vocabulary)
    assert "alpha" not in model.config.transformer_layer_config.rope_parameters


def test_a_wrong_layer_id_is_the_users_mistake(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    with pytest.raises(UserError, match="layer"):
        build(facts, edge, vocabulary, ids=(2, 4, 8))


def test_a_weight_of_another_shape_never_broadcasts(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    with pytest.raises(AssertionError, match="64"):
        build(facts, dataclasses.replace(edge, norm=torch.ones(1)), vocabulary)


def test_what_is_neither_drawn_nor_loaded_is_found(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    matrices = [name for name, p in build(facts, edge, vocabulary).named_parameters() if p.ndim > 1]
    monkeypatch.setattr(speculators_model, "_give", lambda parameter, values: None)
    with pytest.raises(AssertionError) as error:
        build(facts, edge, vocabulary)
    assert str(error.value).partition(": ")[2].split(", ") == matrices


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -65504.0])
def test_a_single_value_decides_whether_all_are_finite(dtype: torch.dtype, value: float) -> None:
    tensor = torch.randn(33, 17, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert all_finite(tensor)
    tensor[20, 5] = value
    assert all_finite(tensor) == math.isfinite(value)


def test_a_weight_that_is_not_finite_is_found(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    bad = edge.embedding.clone()
    bad[0, 0] = float("nan")
    with pytest.raises(AssertionError, match=r"embed_tokens\.weight"):
        build(facts, dataclasses.replace(edge, embedding=bad), vocabulary)


def test_api_drift_names_the_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    assert required_symbols().startswith("0.9")
    import speculators.losses
    import speculators.models.eagle3 as eagle3

    def other_forward(self: Any, hidden_states: Any, input_ids: Any) -> None: ...

    monkeypatch.delattr(speculators.losses, "resolve_loss_config")
    monkeypatch.setattr(eagle3.Eagle3DraftModel, "forward", other_forward)
    with pytest.raises(UserError) as caught:
        required_symbols()
    text = str(caught.value)
    assert "resolve_loss_config is missing" in text
    assert "forward no longer takes document_ids" in text
    assert ">=0.9,<0.10, installed is 0.9" in text


def test_a_random_head_is_drawn_last_so_that_nothing_else_depends_on_the_head(
    facts: VerifierFacts, edge: EdgeWeights, vocabulary: DraftVocabulary
) -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    sliced, drawn, again = (
        build(facts, edge, vocabulary, seed=3, head=head, train_head=train)
        for head, train in ((HeadStart.verifier, False), (HeadStart.random, True), (HeadStart.random, False))
    )
    assert torch.equal(before, torch.random.get_rng_state())
    for name, parameter in sliced.named_parameters():
        same = torch.equal(parameter, drawn.get_parameter(name))
        assert same is (name != "lm_head.weight"), name
    assert torch.equal(drawn.lm_head.weight, again.lm_head.weight)
    assert 0.018 < float(drawn.lm_head.weight.detach().std()) < 0.022
    trained = [m.lm_head.weight.requires_grad for m in (sliced, drawn, again)]
    assert trained == [False, True, False]
    assert not drawn.verifier_lm_head.weight.requires_grad
