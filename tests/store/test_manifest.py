"""The manifest's own form, identity checks, and disk estimates."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.store.disk import check_free_space, estimate_bytes
from eagle3lab.store.manifest import check_identity, read_manifest, write_manifest


def test_a_manifest_survives_writing_and_reading(tmp_path: Path, fake: SimpleNamespace) -> None:
    manifest = fake.manifest(layer_ids=[1, 2])
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert read_manifest(tmp_path).layer_ids == (1, 2)


def test_the_same_verifier_under_another_name_is_accepted(fake: SimpleNamespace) -> None:
    check_identity(fake.manifest(), fake.manifest(name="other").verifier, [2, 5])


def test_every_difference_of_verifier_and_layers_is_named_at_once(fake: SimpleNamespace) -> None:
    other = fake.manifest(config_hash="x", weight_fingerprint="y").verifier
    with pytest.raises(UserError) as caught:
        check_identity(fake.manifest(), other, [2, 3, 6])
    text = str(caught.value)
    assert len(caught.value.problems) == 2  # the verifier, and the layers
    assert "they differ in config_hash, weight_fingerprint" in text
    assert "{'config_hash': 'cccccccc', 'weight_fingerprint': 'wwwwwwww'}" in text
    assert "{'config_hash': 'x', 'weight_fingerprint': 'y'}" in text
    assert "[3, 6]; expected some of [2, 4, 5]" in text
    assert "draft.aux_layer_ids=[2,4,5]" in text
    assert "extract.layer_ids=[2,3,4,5,6]" in text


def test_verifier_facts_without_a_fingerprint_compare_what_they_have(fake: SimpleNamespace) -> None:
    facts = SimpleNamespace(
        architecture="LlamaForCausalLM",
        config_hash="c" * 8,
        hidden_size=fake.HIDDEN,
        num_layers=8,
        vocab_size=fake.VOCAB,
        rms_norm_eps=1e-5,
    )
    check_identity(fake.manifest(), facts, fake.LAYERS)
    facts.hidden_size = 16
    with pytest.raises(
        UserError, match=r"differ in hidden_size: \{'hidden_size': 8\}; expected \{'hidden_size': 16\}"
    ):
        check_identity(fake.manifest(), facts, fake.LAYERS)


def test_bytes_are_tokens_times_slots_times_hidden_times_width(store: Path) -> None:
    assert estimate_bytes(321, 32, 3, "bfloat16") == 82_176
    assert estimate_bytes(65_536, 2880, 3, "bfloat16") == 1_509_949_440
    assert estimate_bytes(10, 8, 3, "float32") == 2 * estimate_bytes(10, 8, 3, "bfloat16")


def test_a_disk_that_is_too_small_is_refused_with_both_numbers(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(UserError, match=r"9,000,000,000,000,000 bytes[\s\S]*are free"):
        check_free_space(tmp_path / "not" / "yet" / "there", 9_000_000_000_000_000)


def test_manifests_are_read_without_torch() -> None:
    code = "import sys; import eagle3lab.store.manifest, eagle3lab.store.index, eagle3lab.store.disk; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
