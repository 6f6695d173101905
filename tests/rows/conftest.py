from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.schema import DataConfig, ModelConfig
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import RowSet
from eagle3lab.rows.tokenizer import load_tokenizer
from eagle3lab.verifier.facts import VerifierFacts, read_facts

SHARED = Path(__file__).parent.parent / "cases" / "_shared"
WriteJsonl = Callable[..., str]


@pytest.fixture(scope="session")
def shared() -> Path:
    """Tokenizers, templates and tiny verifiers of the shipped cases."""
    return SHARED


@pytest.fixture(scope="session")
def facts() -> VerifierFacts:
    """target_tiny: 264 ids, 512 positions, end token 258."""
    return read_facts(SHARED / "target_tiny")


@pytest.fixture(scope="session")
def byte_tokenizer() -> Any:
    """Byte b has id b; ids from 256 on are special tokens."""
    return load_tokenizer(ModelConfig(name="bytes"), SHARED / "target_tiny")


@pytest.fixture
def write_jsonl(tmp_path: Path) -> WriteJsonl:
    def write(*records: Any, name: str = "data.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(json.dumps(r) + "\n" for r in records), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def rows_of(write_jsonl: WriteJsonl, facts: VerifierFacts) -> Callable[..., RowSet]:
    """Rows of records under target_tiny; keywords are fields of the data or the model configuration."""

    def build(*records: Any, num_workers: int = 0, **fields: Any) -> RowSet:
        model_fields = {k: v for k, v in fields.items() if hasattr(ModelConfig(), k)}
        data_fields = {k: v for k, v in fields.items() if k not in model_fields}
        data = DataConfig(name="test", paths=[write_jsonl(*records)])
        model = ModelConfig(name="test")
        return build_rows(
            replace(data, **data_fields), replace(model, **model_fields), facts, num_workers=num_workers
        )

    return build


def chat(*contents: str, **keys: Any) -> dict[str, Any]:
    """A record of alternating user and assistant turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)], **keys}


@pytest.fixture(name="chat")
def chat_fixture() -> Callable[..., dict[str, Any]]:
    return chat
