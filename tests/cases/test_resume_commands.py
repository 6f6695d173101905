"""EXT-10 as a command: what a resumed run keeps of a half-written store."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3lab.config.errors import EXIT_USER_ERROR, UserError
from eagle3lab.data import Eagle3SampleFileDataset
from eagle3lab.engines.base import States
from eagle3lab.engines.hf import HuggingFaceEngine

PARTIAL = Path(__file__).parent / "EXT-10" / "partial_output"
EXPECTED = json.loads((PARTIAL.parent / "expected.json").read_text())
Extract = Callable[..., Any]


def test_ext_10_a_directory_of_another_layout_is_refused_and_left_alone(
    extract_command: Extract, tmp_path: Path
) -> None:
    copy = tmp_path / "store"
    shutil.copytree(PARTIAL, copy)
    before = {path.name: path.read_bytes() for path in copy.iterdir()}
    done = extract_command("EXT-10", expect=EXIT_USER_ERROR)
    assert "is neither a store nor an empty directory" in done.err
    assert "self-test" not in done.out  # before a verifier is loaded for it
    assert "hs_0.safetensors" in done.err
    assert {path.name: path.read_bytes() for path in copy.iterdir()} == before


def test_ext_10_files_that_are_not_whole_are_never_rows() -> None:
    with pytest.raises(UserError) as refused:
        Eagle3SampleFileDataset(PARTIAL)
    assert "hs_1.safetensors" in str(refused.value) or "hs_3.safetensors" in str(refused.value)


def test_ext_10_a_resumed_command_captures_what_is_missing_and_leaves_no_temporary_file(
    extract_command: Extract, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 0 indexed, 1 cut, 2 temporary, 3 empty, 4 of another row: one row in a shard, as in the case."""
    whole = extract_command("EXT-10", "extract.shard_tokens=1", store="whole")
    capture, calls = HuggingFaceEngine.capture, []

    def interrupted(self: Any, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States]:
        calls.append(rows)
        if len(calls) == 3:  # the self-test, row 0, then the end
            raise KeyboardInterrupt
        return capture(self, rows, layer_ids)

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceEngine, "capture", interrupted)
        with pytest.raises(KeyboardInterrupt):
            extract_command("EXT-10", "extract.shard_tokens=1")
    shards = whole.store.with_name("store") / "shards"
    complete = {path.name: path.read_bytes() for path in (whole.store / "shards").iterdir()}
    assert [path.name for path in shards.iterdir()] == ["00000.safetensors"]
    (shards / "00001.safetensors").write_bytes(complete["00001.safetensors"][:7891])
    (shards / "00002.safetensors.tmp").write_bytes(complete["00002.safetensors"][:100])
    (shards / "00003.safetensors").write_bytes(b"")
    (shards / "00004.safetensors").write_bytes(complete["00003.safetensors"])

    asked: list[list[int]] = []

    def seen(self: Any, rows: Sequence[Sequence[int]], layer_ids: Sequence[int]) -> list[States]:
        asked.extend(list(row) for row in rows)
        return capture(self, rows, layer_ids)

    with monkeypatch.context() as patch:
        patch.setattr(HuggingFaceEngine, "capture", seen)
        done = extract_command("EXT-10", "extract.shard_tokens=1")
    rows = [ids for ids, _ in done.rows()]
    num_tested = len(asked) - len(EXPECTED["extracted_again"])
    assert asked[num_tested:] == [rows[i] for i in EXPECTED["extracted_again"]]
    assert "left by an interrupted run" in done.out
    assert {str(i): row.length for i, row in enumerate(done.reader.rows)} == EXPECTED["after"]["lengths"]
    assert {path.name: path.read_bytes() for path in shards.iterdir()} == complete
    assert not list(done.store.rglob("*.tmp"))
