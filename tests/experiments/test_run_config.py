"""What a run was, read back from its directory, and which runs are one variant."""

from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.config.errors import IntegrityError
from eagle3lab.experiments.run_config import (
    differing_keys,
    flatten,
    group_by_configuration,
    is_seed,
    read_run_config,
    repeated_seeds,
)

from ..evaluate.evaluation_files import write_run


def test_runs_that_differ_in_seeds_and_places_alone_are_one_variant(tmp_path: Path) -> None:
    runs = [
        read_run_config(write_run(tmp_path / "r0", seed=0)),
        read_run_config(write_run(tmp_path / "r1", noise="uniform")),
        read_run_config(write_run(tmp_path / "r2", seed=1, store="copy_of_a")),
        None,
        read_run_config(write_run(tmp_path / "r4", noise="uniform", seed=7)),
        None,
    ]
    assert group_by_configuration(runs) == [(0, 2), (1, 4), (3,), (5,)]
    assert group_by_configuration(runs, ignore=["noise"]) == [(0, 1, 2, 4), (3,), (5,)]
    assert differing_keys(runs) == ["noise.kind"]


def test_another_commit_or_another_store_is_another_variant(tmp_path: Path) -> None:
    runs = [
        read_run_config(write_run(tmp_path / "r0")),
        read_run_config(write_run(tmp_path / "r1", seed=1, commit="2" * 40)),
        read_run_config(write_run(tmp_path / "r2", seed=2, manifest="n" * 64)),
    ]
    assert group_by_configuration(runs) == [(0,), (1,), (2,)]
    assert differing_keys(runs) == ["store", "git.commit"]
    assert group_by_configuration(runs, ["git.commit", "store"]) == [(0, 1, 2)]
    assert runs[0] is not None
    assert runs[0].values["store"] == "/stores/a"  # shown by its place, compared by its content


def test_values_keep_their_types_and_seeds_stand_apart(tmp_path: Path) -> None:
    run = read_run_config(write_run(tmp_path / "r", lr="1.0e-04", seed=3))
    assert run is not None
    assert run.values["optim.lr"] == 1e-4
    assert dict(run.seeds) == {"train.seed": 3, "data.seed": 0}
    assert not [key for key in run.values if key.startswith("run_")]


def test_a_key_that_one_configuration_lacks_is_a_difference(tmp_path: Path) -> None:
    write_run(tmp_path / "old")
    new = write_run(tmp_path / "new")
    (new / "config.yaml").write_text((new / "config.yaml").read_text() + "loss:\n  kind: kl\n")
    assert differing_keys([read_run_config(tmp_path / "old"), read_run_config(new)]) == ["loss.kind"]


def test_one_seed_twice_is_found(tmp_path: Path) -> None:
    runs = [read_run_config(write_run(tmp_path / f"r{i}", seed=s)) for i, s in enumerate((0, 1, 0))]
    assert repeated_seeds(runs) == (0, 2)
    assert repeated_seeds([*runs[:2], None, None]) is None


def test_nested_keys() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": [1, {"e": 2}]}) == {"a.b": 1, "a.c": {}, "d": [1, {"e": 2}]}
    assert [is_seed(k) for k in ("train.seed", "seed", "data.split_seed", "train.seeds_per", "a.seed.b")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_no_configuration_is_none_and_a_broken_one_is_said(tmp_path: Path) -> None:
    assert read_run_config(tmp_path) is None
    for text in ("a: [1\n", "- 1\n"):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(IntegrityError, match=r"config\.yaml"):
            read_run_config(tmp_path)
