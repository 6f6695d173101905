from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from eagle3lab.config.schema import ModelConfig, Shapes, TrainRoot, VerifierSource
from eagle3lab.doctor.check import Check, Status
from eagle3lab.doctor.verifier import check_verifier
from eagle3lab.verifier.locate import CACHE_VARIABLE

NAMES = ["files", "facts", "aux layers", "edge weights", "tokenizer", "template", "conversations"]


def test_a_healthy_verifier_shows_a_sample_with_its_mask(cfg: TrainRoot, named: Callable[..., Check]) -> None:
    checks = list(check_verifier(cfg.model, cfg.data))
    assert [c.name for c in checks] == NAMES
    assert all(c.status is Status.ok for c in checks), checks
    sample = named(checks, "template").found
    assert "[[" in sample
    assert "Two plus two is four." in sample.partition("[[")[2].partition("]]")[0]
    assert "12 read = " in named(checks, "conversations").found


def test_a_missing_shard_is_named_with_its_remedy(
    cfg: TrainRoot, local_model: ModelConfig, local_verifier: Path, named: Callable[..., Check]
) -> None:
    tensors = load_file(local_verifier / "model.safetensors")
    (local_verifier / "model.safetensors").unlink()
    names = sorted(tensors)
    save_file({n: tensors[n] for n in names[::2]}, local_verifier / "model-00001-of-00002.safetensors")
    weight_map = {n: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, n in enumerate(names)}
    (local_verifier / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))

    checks = list(check_verifier(local_model, cfg.data))
    check = named(checks, "files")
    assert check.status is Status.fail
    assert "model-00002-of-00002.safetensors" in check.found
    assert "download the missing files" in check.remedy
    assert named(checks, "edge weights").status is Status.fail
    assert named(checks, "template").status is Status.ok  # what does not need weights is still looked at


def test_a_template_that_fails_is_named_with_its_remedy(
    cfg: TrainRoot, local_model: ModelConfig, local_verifier: Path, named: Callable[..., Check]
) -> None:
    (local_verifier / "chat_template.jinja").write_text("{{ raise_exception('no users here') }}")
    check = named(list(check_verifier(local_model, cfg.data)), "template")
    assert check.status is Status.fail
    assert "no users here" in check.found
    assert "model.template=FILE.jinja" in check.remedy


def test_a_template_that_is_no_jinja_is_named(
    cfg: TrainRoot, local_model: ModelConfig, local_verifier: Path, named: Callable[..., Check]
) -> None:
    (local_verifier / "chat_template.jinja").write_text("{% for m in %}")
    check = named(list(check_verifier(local_model, cfg.data)), "template")
    assert check.status is Status.fail
    assert "not valid Jinja" in check.found


def test_shapes_that_the_checkpoint_contradicts_are_named(
    cfg: TrainRoot, named: Callable[..., Check]
) -> None:
    shapes = cfg.model.shapes
    assert isinstance(shapes, Shapes)
    model = dataclasses.replace(cfg.model, shapes=dataclasses.replace(shapes, num_layers=5))
    check = named(list(check_verifier(model, cfg.data)), "facts")
    assert check.status is Status.fail
    assert check.remedy == "model.shapes.num_layers=4"


def test_missing_conversations_do_not_hide_the_template(cfg: TrainRoot, named: Callable[..., Check]) -> None:
    data = dataclasses.replace(cfg.data, paths=["/nowhere/chat.jsonl"])
    checks = list(check_verifier(cfg.model, data))
    assert named(checks, "template").status is Status.ok
    assert named(checks, "conversations").status is Status.fail


def test_the_embedded_verifier_is_not_fetched_by_a_check(
    cfg: TrainRoot, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    model = ModelConfig(name="smollm2_135m", source=VerifierSource.smollm2_135m)
    (check,) = check_verifier(model, cfg.data)
    assert check.status is Status.warn
    assert "extract.py fetches it" in check.remedy
    assert not list(tmp_path.iterdir())
