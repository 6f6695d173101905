from __future__ import annotations

from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.config.schema import ModelConfig, VerifierSource
from eagle3lab.verifier import fetch
from eagle3lab.verifier.locate import asset_path, cache_dir, locate_verifier


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert locate_verifier(ModelConfig(name="m", path=str(tmp_path))) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "models").mkdir()
    assert locate_verifier(ModelConfig(name="m", path="~/models")) == tmp_path / "models"


def test_missing_local_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no such verifier directory.*absent"):
        locate_verifier(ModelConfig(name="m", path=str(tmp_path / "absent")))
    with pytest.raises(UserError, match=r"model\.path="):
        locate_verifier(ModelConfig(name="m"))


def test_path_and_a_source_with_its_own_files_exclude_each_other(tmp_path: Path) -> None:
    model = ModelConfig(name="tiny", source=VerifierSource.tiny, path=str(tmp_path))
    with pytest.raises(UserError, match=r"model=local"):
        locate_verifier(model)


def test_tiny_is_shipped() -> None:
    path = locate_verifier(ModelConfig(name="tiny", source=VerifierSource.tiny))
    assert path == asset_path("tiny")
    assert (path / "LICENSE").is_file()
    assert (path / "NOTICE.md").is_file()


def test_smollm2_is_looked_for_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch, "fetch_smollm2", lambda cache, quiet: cache / f"found-{quiet}")
    model = ModelConfig(name="s", source=VerifierSource.smollm2_135m)
    assert locate_verifier(model, quiet=True) == tmp_path / "found-True"


def test_cache_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLE3LAB_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("EAGLE3LAB_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "eagle3lab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "eagle3lab"


@pytest.mark.parametrize("name", ["", "absent", "../verifier", "/etc/passwd"])
def test_unknown_assets_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UserError, match="tiny"):
        asset_path(name)
