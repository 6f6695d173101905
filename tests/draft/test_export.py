from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.config.schema import LayerType
from eagle3lab.draft import export as export_module
from eagle3lab.draft.export import export_draft, load_draft, read_export
from eagle3lab.draft.format import CONFIG_FILE, engine_view
from eagle3lab.draft.inference import ChainDrafter
from eagle3lab.draft.speculators_model import vocabulary_of
from eagle3lab.draft.ttt import LossRecorder, ttt_forward
from eagle3lab.draft.vocabulary import DraftVocabulary
from eagle3lab.store.trained_on import TRAINED_ON_FILE, text_key, trained_on, write_trained_on
from eagle3lab.verifier.facts import VerifierFacts, weight_fingerprint
from eagle3lab.verifier.weights import EdgeWeights

FIELDS: list[dict[str, Any]] = [
    {},
    {"layer_type": LayerType.qwen3, "num_layers": 2, "sliding_window": 16},
    {"norm_before_fc": True, "norm_output": True, "norm_before_residual": False},
    {"fc_norm": True, "aux_layer_ids": (1, 2, 4, 5)},
    {"vocabulary": DraftVocabulary.full(128), "attention": "flex"},
]


@pytest.mark.parametrize("fields", FIELDS)
def test_what_is_read_back_trains_on_exactly_like_what_was_written(
    fields: dict[str, Any],
    make_draft: Callable[..., Any],
    make_batch: Callable[..., Any],
    facts: VerifierFacts,
    edge: EdgeWeights,
    recorder: LossRecorder,
    tmp_path: Path,
) -> None:
    model = make_draft(**fields)
    export_draft(model, tmp_path / "draft", {"run": "r"})
    loaded = load_draft(tmp_path / "draft", facts, edge)
    for (name, ours), (other, theirs) in zip(
        model.state_dict().items(), loaded.state_dict().items(), strict=True
    ):
        assert name == other
        assert torch.equal(ours, theirs), name
    trainable = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trainable == [n for n, p in loaded.named_parameters() if p.requires_grad]
    batch = make_batch((12,), num_aux=len(fields.get("aux_layer_ids", (2, 4, 5))))
    if fields.get("attention") != "flex":
        expected = ttt_forward(model, batch, 3, recorder).loss_sums
        assert torch.equal(ttt_forward(loaded, batch, 3, recorder).loss_sums, expected)


def test_a_draft_loaded_in_bf16_keeps_its_rotary_frequencies(
    make_draft: Callable[..., Any],
    make_batch: Callable[..., Any],
    facts: VerifierFacts,
    edge: EdgeWeights,
    tmp_path: Path,
) -> None:
    model = make_draft(scale=2.0)
    export_draft(model, tmp_path / "draft", {})
    low: Any = load_draft(tmp_path / "draft", facts, edge, dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert torch.equal(low.rotary_emb.inv_freq, model.rotary_emb.inv_freq)
    batch = make_batch((40,))
    full, half = (
        d.logits(d.extend(batch["hidden_states"][0], batch["input_ids"][0]))
        for d in (ChainDrafter(model), ChainDrafter(low))
    )
    assert float((half.float() - full).norm() / full.norm()) < 0.03


def test_the_files_say_what_an_engine_looks_up(make_draft: Callable[..., Any], tmp_path: Path) -> None:
    model = make_draft(aux_layer_ids=(1, 2, 4, 5), layer_type=LayerType.qwen3)
    export_draft(model, tmp_path / "draft", {"run": "r"}, verifier_name="org/name")
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4, 5]
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert config["transformer_layer_config"]["model_type"] == "qwen3"
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "org/name",
        "architectures": ["LlamaForCausalLM"],
    }
    assert config["dtype"] == "float32"
    assert config["norm_before_residual"] is True
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    assert not any(name.startswith("verifier_") for name in tensors)
    ids = torch.arange(32) + tensors["d2t"]
    assert torch.equal(ids, tensors["t2d"].nonzero()[:, 0])
    provenance = json.loads((tmp_path / "draft" / "provenance.json").read_text())
    assert provenance["run"] == "r"
    assert provenance["verifier"]["config_hash"] == "0" * 64


def test_rope_frequencies_follow_the_exported_config(make_draft: Callable[..., Any], tmp_path: Path) -> None:
    model = make_draft()
    export_draft(model, tmp_path / "draft", {})
    layer = read_export(tmp_path / "draft")[0]["transformer_layer_config"]
    theta, dim = layer["rope_parameters"]["rope_theta"], layer["head_dim"]
    by_hand = [math.pow(theta, -2 * i / dim) for i in range(dim // 2)]
    torch.testing.assert_close(model.rotary_emb.inv_freq, torch.tensor(by_hand))


def test_an_export_gives_the_same_bytes_twice_and_leaves_nothing_beside(
    make_draft: Callable[..., Any], tmp_path: Path
) -> None:
    model = make_draft()
    for name in ("a", "b", "b"):
        export_draft(model, tmp_path / name, {"run": "r"})
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]
    assert sorted(os.listdir(tmp_path / "a")) == ["config.json", "model.safetensors", "provenance.json"]
    for file in os.listdir(tmp_path / "a"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()


def test_a_write_that_went_wrong_keeps_the_export_before_it(
    make_draft: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_draft(make_draft(), tmp_path / "draft", {})
    before = (tmp_path / "draft" / "model.safetensors").read_bytes()

    def lossy(tensors: dict[str, torch.Tensor], path: Path, metadata: dict[str, str]) -> None:
        rounded = tensors["fc.weight"].bfloat16().float()
        save_file({**tensors, "fc.weight": rounded}, path, metadata=metadata)

    monkeypatch.setattr(export_module, "save_file", lossy)
    with pytest.raises(IntegrityError, match="logits"):
        export_draft(make_draft(seed=9), tmp_path / "draft", {})
    assert os.listdir(tmp_path) == ["draft"]
    assert (tmp_path / "draft" / "model.safetensors").read_bytes() == before


def test_a_config_that_contradicts_the_model_is_found(make_draft: Callable[..., Any], tmp_path: Path) -> None:
    model = make_draft()
    model.config.norm_before_residual = False
    model.config.eagle_aux_hidden_state_layer_ids = [2, 4, 6]
    with pytest.raises(IntegrityError, match="another norm_before_residual"):
        export_draft(model, tmp_path / "draft", {})
    assert os.listdir(tmp_path) == []


def test_a_draft_of_another_verifier_is_refused_with_every_reason(
    make_draft: Callable[..., Any], facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    export_draft(make_draft(), tmp_path / "draft", {}, verifier_name="org/right")
    wide = dataclasses.replace(facts, hidden_size=128, vocab_size=256, config_hash="1" * 64)
    with pytest.raises(UserError) as caught:
        load_draft(tmp_path / "draft", wide, edge)
    text = str(caught.value)
    for part in ("hidden size", "vocabulary", "config hash", "org/right", "model.path=org/right"):
        assert part in text
    retrained = dataclasses.replace(edge, embedding=edge.embedding + 1e-3)
    with pytest.raises(UserError, match="embedding is not this verifier's"):
        load_draft(tmp_path / "draft", facts, retrained)


def test_a_directory_without_a_draft_is_the_users_mistake(
    facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="no exported draft here"):
        load_draft(tmp_path, facts, edge)
    (tmp_path / "draft").mkdir()
    (tmp_path / "draft" / CONFIG_FILE).write_text("{}")
    with pytest.raises(UserError) as caught:  # the run directory in place of the draft in it
        load_draft(tmp_path, facts, edge)
    assert caught.value.problems[0].fix == f"draft={tmp_path / 'draft'}"


@pytest.mark.parametrize(
    ("where", "value"),
    [
        ((), [1]),
        (("speculators_config",), "x"),
        (("speculators_config", "verifier"), "x"),
        (("eagle_aux_hidden_state_layer_ids",), 2),
        (("norm_output",), "no"),
        (("architectures",), None),
        (("draft_vocab_size",), 1.5),
        (("transformer_layer_config", "rope_parameters"), "llama3"),
        (("transformer_layer_config", "num_hidden_layers"), "1"),
        (("transformer_layer_config", "rms_norm_eps"), "1e-6"),
        (("transformer_layer_config", "mlp_bias"), True),
    ],
)
def test_a_config_edited_to_another_kind_of_value_is_named(
    where: tuple[str, ...],
    value: object,
    make_draft: Callable[..., Any],
    facts: VerifierFacts,
    edge: EdgeWeights,
    tmp_path: Path,
) -> None:
    export_draft(make_draft(), tmp_path, {})
    file = tmp_path / "config.json"
    config = {"": json.loads(file.read_text())}
    part: dict[str, Any] = config
    *above, last = ("", *where)
    for key in above:
        part = part[key]
    part[last] = value
    file.write_text(json.dumps(config[""]))
    with pytest.raises(
        IntegrityError, match="mlp.gate_proj.bias" if last == "mlp_bias" else last or "holds a list"
    ):
        load_draft(tmp_path, facts, edge)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_weights_in_a_form_that_is_not_read_are_named(
    dtype: torch.dtype, make_draft: Callable[..., Any], tmp_path: Path
) -> None:
    export_draft(make_draft(), tmp_path, {})
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "fc.weight": tensors["fc.weight"].to(dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(IntegrityError, match=rf"fc\.weight is {dtype}; expected bf16"):
        read_export(tmp_path)


def test_a_truncated_file_is_reported_as_damaged(
    make_draft: Callable[..., Any], facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    export_draft(make_draft(), tmp_path / "draft", {})
    weights = tmp_path / "draft" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(IntegrityError, match="cannot be read"):
        load_draft(tmp_path / "draft", facts, edge)


def test_a_loaded_draft_outlives_its_file(
    make_draft: Callable[..., Any], facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    export_draft(make_draft(), tmp_path / "draft", {})
    loaded = load_draft(tmp_path / "draft", facts, edge)
    before = {name: tensor.clone() for name, tensor in loaded.state_dict().items()}
    weights = tmp_path / "draft" / "model.safetensors"
    with open(weights, "r+b") as file:  # written over, not replaced
        file.write(bytes(weights.stat().st_size))
    assert all(torch.equal(tensor, before[name]) for name, tensor in loaded.state_dict().items())


def test_the_vocabulary_of_the_file_wins(
    make_draft: Callable[..., Any], facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    chosen = DraftVocabulary.from_ids([2, 5, 100, 120], 128)
    export_draft(make_draft(vocabulary=chosen), tmp_path / "draft", {})
    loaded = load_draft(tmp_path / "draft", facts, edge)
    assert vocabulary_of(loaded).same_as(chosen)
    assert torch.equal(loaded.verifier_lm_head.weight, edge.head[torch.tensor([2, 5, 100, 120])])


def test_speculators_own_directory_is_read_too(
    make_draft: Callable[..., Any], facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    model = make_draft()
    model.save_pretrained(tmp_path / "theirs")
    loaded = load_draft(tmp_path / "theirs", facts, edge)
    assert torch.equal(loaded.fc.weight, model.fc.weight)


def test_speculators_reads_our_directory(make_draft: Callable[..., Any], tmp_path: Path) -> None:
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    export_draft(make_draft(), tmp_path / "draft", {})
    config = Eagle3SpeculatorConfig.from_pretrained(tmp_path / "draft")
    assert config.eagle_aux_hidden_state_layer_ids == [2, 4, 5]
    assert engine_view(config.to_dict()) == engine_view(read_export(tmp_path / "draft")[0])


def test_a_retrained_verifier_of_the_same_shapes_config_and_embedding_is_told_by_its_weights(
    make_draft: Callable[..., Any], facts: VerifierFacts, edge: EdgeWeights, tmp_path: Path
) -> None:
    weights = {"model.norm.weight": edge.norm, "model.layers.0.mlp.up_proj.weight": edge.head}
    for name, scale in (("right", 1.0), ("retrained", 1.001)):
        (tmp_path / name).mkdir()
        changed = weights | {"model.layers.0.mlp.up_proj.weight": edge.head * scale}
        save_file(changed, tmp_path / name / "model.safetensors")
    right, retrained = (dataclasses.replace(facts, path=tmp_path / n) for n in ("right", "retrained"))
    fingerprint = weight_fingerprint(right.path)
    export_draft(make_draft(), tmp_path / "draft", {}, verifier_fingerprint=fingerprint)
    load_draft(tmp_path / "draft", right, edge)
    with pytest.raises(UserError) as caught:
        load_draft(tmp_path / "draft", retrained, edge)
    text = str(caught.value)
    assert "belongs to another verifier" in text
    assert f"weight fingerprint of the draft's verifier: '{fingerprint}'" in text
    assert weight_fingerprint(retrained.path) in text
    provenance = json.loads((tmp_path / "draft" / "provenance.json").read_text())
    assert provenance["verifier"]["weight_fingerprint"] == fingerprint


def test_the_keys_of_the_training_rows_go_along_and_no_engine_takes_them_for_weights(
    make_draft: Callable[..., Any], tmp_path: Path
) -> None:
    keys = tmp_path / TRAINED_ON_FILE
    write_trained_on(keys, trained_on([], [text_key("seen")]))
    export_draft(make_draft(), tmp_path / "draft", {}, trained_on=keys)
    copied = tmp_path / "draft" / TRAINED_ON_FILE
    assert copied.read_bytes() == keys.read_bytes()
    provenance = json.loads((tmp_path / "draft" / "provenance.json").read_text())
    assert provenance[TRAINED_ON_FILE] == {"sha256": hashlib.sha256(keys.read_bytes()).hexdigest()}
    weights = [p for ending in ("safetensors", "bin", "pt") for p in (tmp_path / "draft").glob(f"*.{ending}")]
    assert [p.name for p in weights] == ["model.safetensors"]
