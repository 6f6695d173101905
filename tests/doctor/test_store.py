from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

from eagle3lab.config.schema import ModelConfig, TrainRoot
from eagle3lab.doctor.check import Check, Status
from eagle3lab.doctor.store import check_store, spread
from eagle3lab.store.manifest import read_manifest, write_manifest
from eagle3lab.verifier.locate import asset_path

COMMAND = "python extract.py model=tiny"


def look(path: Path, model: ModelConfig) -> list[Check]:
    return list(check_store(path, model, asset_path("tiny"), extract_command=COMMAND))


def test_a_whole_store_is_ok(whole_store: Path, cfg: TrainRoot, named: Callable[..., Check]) -> None:
    checks = look(whole_store, cfg.model)
    assert [c.name for c in checks] == ["manifest", "index and headers", "checksums", "rows", "identity"]
    assert all(c.status is Status.ok for c in checks), checks
    assert "(all)" in named(checks, "checksums").found


def test_no_store_yet_is_a_warning_with_the_command_that_makes_it(tmp_path: Path, cfg: TrainRoot) -> None:
    (check,) = look(tmp_path, cfg.model)
    assert check.status is Status.warn
    assert check.remedy == COMMAND


def test_a_flipped_byte_is_found_and_the_shard_named(
    store: Path, cfg: TrainRoot, named: Callable[..., Check]
) -> None:
    shard = sorted((store / "shards").iterdir())[-1]
    data = bytearray(shard.read_bytes())
    data[-7] ^= 0x40
    shard.write_bytes(data)
    check = named(look(store, cfg.model), "checksums")
    assert check.status is Status.fail
    assert shard.name in check.found
    assert f"rm {shard}" in check.remedy


def test_a_cut_manifest_is_found(store: Path, cfg: TrainRoot, named: Callable[..., Check]) -> None:
    manifest = store / "manifest.json"
    manifest.write_text(manifest.read_text()[:200])
    check = named(look(store, cfg.model), "manifest")
    assert check.status is Status.fail
    assert "is not the manifest of a store" in check.found
    assert COMMAND in check.remedy


def test_a_lost_index_line_is_found(store: Path, cfg: TrainRoot, named: Callable[..., Check]) -> None:
    index = store / "index.jsonl"
    index.write_text("".join(index.read_text().splitlines(keepends=True)[:-1]))
    check = named(look(store, cfg.model), "index and headers")
    assert check.status is Status.fail
    assert "num_rows of the index" in check.found


def test_a_store_of_another_verifier_or_template_is_named(
    store: Path,
    cfg: TrainRoot,
    local_model: ModelConfig,
    local_verifier: Path,
    named: Callable[..., Check],
) -> None:
    write_manifest(store, dataclasses.replace(read_manifest(store), template_hash="0" * 64))
    check = named(look(store, cfg.model), "identity")
    assert check.status is Status.warn
    assert "another chat template" in check.found

    config = json.loads((local_verifier / "config.json").read_text())
    (local_verifier / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.5}))
    checks = list(check_store(store, local_model, local_verifier, extract_command=COMMAND))
    assert named(checks, "identity").status is Status.fail


def test_a_sample_is_spread_over_the_whole_store() -> None:
    assert spread(3, 8) == [0, 1, 2]
    assert spread(100, 1) == [0]
    assert spread(101, 5) == [0, 25, 50, 75, 100]
