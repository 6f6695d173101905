"""Runs a shipped case: its command, with the names of the case mapped to the framework's own."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3lab import cli
from eagle3lab.config.schema import DataConfig, ExtractorConfig, ModelConfig, TooLong
from eagle3lab.rows.build import build_rows
from eagle3lab.rows.rows import RowSet
from eagle3lab.store.reader import StoreReader
from eagle3lab.verifier.facts import VerifierFacts, read_facts

CASES = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("case_run", CASES / "case_run.py")
assert _spec is not None
assert _spec.loader is not None
sys.modules["case_run"] = case_run = importlib.util.module_from_spec(_spec)  # for the test files to import
_spec.loader.exec_module(case_run)
POSITIONS = 512  # of every target


@dataclass(frozen=True)
class RowCase:
    """One case's folder, its expected.json, and the configuration that its command means."""

    folder: Path
    expected: Any
    data: DataConfig
    model: ModelConfig
    extract: ExtractorConfig
    facts: VerifierFacts

    def rows(self, *files: str, model: dict[str, Any] | None = None, **data: Any) -> RowSet:
        """Rows of the command, or of `files` instead, with fields of data and model replaced."""
        if files:
            data["paths"] = [str(self.folder / file) for file in files]
        changed = replace(self.model, **(model or {}))
        return build_rows(replace(self.data, **data), changed, self.facts)

    def overrides(self) -> list[str]:
        """The same configuration as words of a command line."""
        return [
            "model=local",
            "data=jsonl",
            "hardware=cpu",
            *_words("model", self.model, ModelConfig()),
            *_words("data", self.data, DataConfig()),
            *_words("extract", self.extract, ExtractorConfig()),
        ]


def load_case(folder: Path) -> RowCase:
    case = yaml.safe_load((folder / "case.yaml").read_text())
    arguments = dict(re.findall(r"(\S+)=(\S+)", case["command_example"]))
    if (folder / "override.yaml").exists():
        override = yaml.safe_load((folder / "override.yaml").read_text())
        arguments |= {f"{group}.{key}": v for group, values in override.items() for key, v in values.items()}
    data, model, extract = translate(arguments, folder)
    return RowCase(
        folder=folder,
        expected=json.loads((folder / "expected.json").read_text()),
        data=data,
        model=model,
        extract=extract,
        facts=read_facts(Path(str(model.path))),
    )


def translate(arguments: dict[str, Any], folder: Path) -> tuple[DataConfig, ModelConfig, ExtractorConfig]:
    """The case's example names (POLICY P8) to ours; a name without a place here is an error."""
    data, model, extract = DataConfig(name="case"), ModelConfig(name="case"), ExtractorConfig()
    for key, value in arguments.items():
        match key:
            case "hardware" | "out" | "resume":  # an existing store is always continued
                pass
            case "data.truncation_side":  # rows are cut on the right, always
                assert value == "right"
            case "extract.max_num_batched_tokens":  # an engine's own; the Hugging Face backend has no chunks
                pass
            case "model.path":
                model.path = str((folder / value).resolve())
            case "model.tokenizer":
                model.tokenizer = str((folder / value).resolve())
            case "model.trust_remote_code":
                model.trust_remote_code = value == "true"
            case "model.aux_layer_ids":
                model.aux_layer_ids = value
            case "data.path":
                whole = folder / value / "data.jsonl"  # a folder is its only file of conversations
                data.paths = [str(whole if whole.is_file() else folder / value)]
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
            case "extract.batch_size":
                extract.batch_tokens = value * POSITIONS
            case _ if key.startswith("train."):  # `case_run.train_words` says what they mean
                pass
            case _:
                raise AssertionError(f"{folder.name}: {key} has no counterpart")
    return data, model, extract


def _words(group: str, config: Any, default: Any) -> list[str]:
    return [
        f"{group}.{f.name}={_word(getattr(config, f.name))}"
        for f in fields(config)
        if getattr(config, f.name) != getattr(default, f.name)
    ]


def _word(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return "[" + ",".join(map(_word, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_word(v)}" for key, v in value.items()) + "}"
    return str(value)


@pytest.fixture
def row_case() -> Callable[[str], RowCase]:
    return lambda case_id: load_case(CASES / case_id)


@pytest.fixture
def run_of(tmp_path: Path) -> Callable[..., Any]:
    """`run_of(case, *files, validation=files, ids=draft vocabulary)` -> a `case_run.Run` over those rows."""
    return partial(case_run.make_run, tmp_path)


@dataclass
class Done:
    """What a command left: its exit code, what it printed, and where its store would lie."""

    code: int
    out: str
    err: str
    store: Path
    _reader: list[StoreReader] = field(default_factory=list)

    @property
    def reader(self) -> StoreReader:
        """The finished store, opened with every check of its bytes."""
        if not self._reader:
            self._reader.append(StoreReader(self.store, verify="full"))
        return self._reader[0]

    def rows(self) -> list[tuple[list[int], list[int]]]:
        """(input_ids, loss_mask) of every row of the store; states have as many rows as ids, always (P3)."""
        rows = []
        for i in range(len(self.reader)):
            row = self.reader.read(i)
            assert len({len(tensor) for tensor in row.values()}) == 1
            rows.append((row["input_ids"].tolist(), row["loss_mask"].tolist()))
        return rows

    def says_every_count(self) -> None:
        """Each reason of the manifest's account stands with its number in what was printed (P4)."""
        account = self.reader.manifest.accounting
        num_dropped = sum(account["dropped"].values())
        assert account["read"] == account["kept"] + num_dropped
        assert f"{account['read']} read = {account['kept']} kept + {num_dropped} dropped" in self.out
        for kind in ("dropped", "turns_dropped", "repaired", "noted"):
            for reason, count in account[kind].items():
                assert f"{reason} {count}" in self.out, (kind, reason)


@pytest.fixture
def extract_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Run a case's command as `python extract.py` does: Hydra, checks, pipeline, exit code.

    With `entry="train"` the same verifier and the same data are those of `python train.py`.
    """

    def run(case_id: str, *more: str, store: str = "store", expect: int = 0, entry: str = "extract") -> Done:
        words = [*load_case(CASES / case_id).overrides(), f"store={tmp_path / store}", *more]
        monkeypatch.chdir(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", [f"{entry}.py", *words])
            # the installation is not the case's subject, and is checked by tests of its own
            patch.setattr("eagle3lab.doctor.preflight.preflight", lambda *_, **__: "")
            for name in ("HYDRA_FULL_ERROR", "EAGLE3LAB_QUIET_ERRORS"):
                patch.setenv(name, "")  # put back when the command has set them
                os.environ.pop(name)
            capsys.readouterr()
            code = 0
            try:
                cli.main(entry)
            except SystemExit as end:
                code = int(end.code or 0)
        said = capsys.readouterr()
        assert code == expect, f"exit {code}\n{said.out}\n{said.err}"
        return Done(code, said.out, said.err, tmp_path / store)

    return run


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
