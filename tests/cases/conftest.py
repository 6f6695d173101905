"""Runs a shipped case's rows: its command, with the names of the case mapped to the framework's own."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3lab.config.schema import DataConfig, ModelConfig, TooLong
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import RowSet
from eagle3lab.verifier.facts import VerifierFacts, read_facts

CASES = Path(__file__).parent


@dataclass(frozen=True)
class RowCase:
    """One case's folder, its expected.json, and the configuration that its command means."""

    folder: Path
    expected: Any
    data: DataConfig
    model: ModelConfig
    facts: VerifierFacts

    def rows(self, *files: str, model: dict[str, Any] | None = None, **data: Any) -> RowSet:
        """Rows of the command, or of `files` instead, with fields of data and model replaced."""
        if files:
            data["paths"] = [str(self.folder / file) for file in files]
        changed = replace(self.model, **(model or {}))
        return build_rows(replace(self.data, **data), changed, self.facts)


def load_case(folder: Path) -> RowCase:
    case = yaml.safe_load((folder / "case.yaml").read_text())
    arguments = dict(re.findall(r"(\S+)=(\S+)", case["command_example"]))
    if (folder / "override.yaml").exists():
        override = yaml.safe_load((folder / "override.yaml").read_text())
        arguments |= {f"data.{key}": value for key, value in override["data"].items()}
    data, model = translate(arguments, folder)
    return RowCase(
        folder=folder,
        expected=json.loads((folder / "expected.json").read_text()),
        data=data,
        model=model,
        facts=read_facts(Path(str(model.path))),
    )


def translate(arguments: dict[str, Any], folder: Path) -> tuple[DataConfig, ModelConfig]:
    """The case's example names (POLICY P8) to ours; a name without a place here is an error."""
    data, model = DataConfig(name="case"), ModelConfig(name="case")
    for key, value in arguments.items():
        match key:
            case "hardware" | "out" | "data.truncation_side":  # rows are cut on the right, always
                pass
            case "model.path":
                model.path = str((folder / value).resolve())
            case "model.tokenizer":
                model.tokenizer = str((folder / value).resolve())
            case "model.trust_remote_code":
                model.trust_remote_code = value == "true"
            case "data.path":
                data.paths = [str(folder / value)]
            case "data.files":
                data.paths = [str(folder / file) for file in value]
            case "data.template":
                model.template = str(folder / value)
            case "data.template_kwargs":
                model.template_args = value
            case "data.max_length":
                data.max_len, data.too_long = value, TooLong.truncate
            case "data.max_samples":
                data.max_conversations = value
            case "data.shuffle":
                data.shuffle = value
            case "data.seed":
                data.seed = int(value)
            case _:
                raise AssertionError(f"{folder.name}: {key} has no counterpart")
    return data, model


@pytest.fixture
def row_case() -> Callable[[str], RowCase]:
    return lambda case_id: load_case(CASES / case_id)


@pytest.fixture
def tokenizer_copy(tmp_path: Path) -> Callable[[Path, dict[str, Any]], Path]:
    """A copy of a tokenizer directory with other settings."""

    def copy(source: Path, settings: dict[str, Any]) -> Path:
        target = tmp_path / source.name
        shutil.copytree(source, target)
        config = target / "tokenizer_config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | settings))
        return target

    return copy
