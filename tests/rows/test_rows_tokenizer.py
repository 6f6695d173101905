from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import ModelConfig
from eagle3lab.rows.tokenizer import load_tokenizer, special_tokens, template_hash, tokenizer_hash


def test_code_of_a_tokenizer_runs_only_when_allowed(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "ran"
    monkeypatch.setenv("E3_CASE_MARKER", str(marker))
    model = ModelConfig(name="m", tokenizer=str(shared / "tok_slow"))
    with pytest.raises(UserError, match=r"model\.trust_remote_code=true"):
        load_tokenizer(model, shared / "target_tiny")
    assert not marker.exists()
    model.trust_remote_code = True
    assert len(load_tokenizer(model, shared / "target_tiny")) == 264


def test_the_tokenizers_own_template_comes_before_the_verifiers(shared: Path, tmp_path: Path) -> None:
    own = tmp_path / "tok"
    shutil.copytree(shared / "tok_bytes", own)
    fallback = load_tokenizer(ModelConfig(name="m", tokenizer=str(own)), shared / "target_tiny")
    assert template_hash(fallback) == template_hash(
        load_tokenizer(ModelConfig(name="m"), shared / "target_tiny")
    )
    (own / "chat_template.jinja").write_text("{{ messages }}")
    assert load_tokenizer(
        ModelConfig(name="m", tokenizer=str(own)), shared / "target_tiny"
    ).chat_template == ("{{ messages }}")
    explicit = ModelConfig(name="m", tokenizer=str(own), template=str(shared / "templates" / "think.jinja"))
    assert "reasoning_content" in load_tokenizer(explicit, shared / "target_tiny").chat_template


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokenizer": "/no/such/place"}, "no such directory"),
        ({"template": "/no/such/file.jinja"}, "no such file"),
    ],
)
def test_what_is_missing_is_named(fields: dict[str, str], message: str, shared: Path) -> None:
    with pytest.raises(UserError, match=message):
        load_tokenizer(ModelConfig(name="m", **fields), shared / "target_tiny")


def test_a_directory_without_tokenizer_or_template_is_refused(shared: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot load the tokenizer"):
        load_tokenizer(ModelConfig(name="m"), tmp_path)
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(ModelConfig(name="m"), shared / "tok_bytes")


def test_the_hash_is_of_what_decides_ids(shared: Path, tmp_path: Path) -> None:
    model = ModelConfig(name="m")
    original = tokenizer_hash(model, shared / "tok_bytes")
    copy = tmp_path / "copy"
    shutil.copytree(shared / "tok_bytes", copy)
    config = copy / "tokenizer_config.json"
    settings = json.loads(config.read_text())
    config.write_text(json.dumps(settings | {"padding_side": "left", "chat_template": "x"}))
    assert tokenizer_hash(model, copy) == original
    config.write_text(json.dumps(settings | {"add_bos_token": True}))
    assert tokenizer_hash(model, copy) != original
    assert tokenizer_hash(model, shared / "tok_merge") != original
    assert tokenizer_hash(ModelConfig(name="m", tokenizer=str(shared / "tok_bytes")), copy) == original


def test_special_tokens_include_those_without_a_role(shared: Path) -> None:
    tokens = special_tokens(load_tokenizer(ModelConfig(name="m"), shared / "target_tiny"))
    assert tokens["<|turn|>"] == 257
    assert len(tokens) == 8


@pytest.mark.parametrize(
    ("data", "says"), [(b"{# \xe9 #}", "is not UTF-8"), (b"\xef\xbb\xbf{{ messages }}", "byte order mark")]
)
def test_a_template_file_in_another_encoding_is_refused(
    data: bytes, says: str, shared: Path, tmp_path: Path
) -> None:
    file = tmp_path / "t.jinja"
    file.write_bytes(data)
    with pytest.raises(UserError, match=says):
        load_tokenizer(ModelConfig(name="m", template=str(file)), shared / "target_tiny")
