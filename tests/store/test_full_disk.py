"""A file system that runs full at every possible moment: a message, valid shards, and the same bytes later."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from eagle3lab.config.errors import EXIT_USER_ERROR, UserError
from eagle3lab.store.files import sha256_of
from eagle3lab.store.index import read_index
from eagle3lab.store.manifest import is_store
from eagle3lab.store.merge import part_directory

ROOT = Path(__file__).resolve().parents[2]
PAGE, NUM_PAGES = 4096, 120


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of NUM_PAGES pages; skipped where this user may not mount one."""
    path = tmp_path / "disk"
    path.mkdir()
    options = f"size={NUM_PAGES * PAGE}"
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip(f"A FULL DISK IS NOT TESTED HERE: {done.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path, leave_pages: int) -> Path:
    """A file that leaves so many pages of the disk free."""
    ballast = disk / "ballast"
    free = os.statvfs(disk)
    pages = free.f_bavail * free.f_frsize // PAGE - leave_pages
    ballast.write_bytes(b"\0" * (pages * PAGE))
    return ballast


def test_a_disk_that_runs_full_anywhere_leaves_what_is_indexed_valid_and_is_resumed(
    small_disk: Path, tmp_path: Path, fake: SimpleNamespace, capsys: pytest.CaptureFixture
) -> None:
    rows, manifest = fake.rows(60), fake.manifest()
    fake.write(tmp_path / "whole", rows, manifest, shard_tokens=100)
    whole = fake.tree(tmp_path / "whole")
    refused: Counter[str] = Counter()
    for leave_pages in range(1, 40):
        path = small_disk / "store"
        ballast = fill(small_disk, leave_pages)
        try:
            fake.write(path, rows, manifest, shard_tokens=100)
        except UserError as error:
            text = str(error)
            assert "No space left on device" in text
            assert "errno 28" in text
            assert "run the same command again" in text
            refused[text.split("cannot write ")[1].split(" ")[0].rsplit("/", 1)[1].lstrip("0123456789")] += 1
        else:
            assert fake.tree(path) == whole
        entries, torn = read_index(path)
        assert not torn
        assert all(sha256_of(path / entry.file) == entry.sha256 for entry in entries)
        shards = {p.name for p in (path / "shards").iterdir()} if is_store(path) else set()
        assert len(shards) - len(entries) in (0, 1)
        assert not any(name.endswith(".tmp") for name in shards)
        ballast.unlink()
        fake.write(path, rows, manifest, shard_tokens=100)
        assert fake.tree(path) == whole, leave_pages
        subprocess.run(["rm", "-r", str(path)], check=True)
    with capsys.disabled():
        print(f"\nfull disk: {sum(refused.values())} runs refused while writing {dict(refused)}; all resumed")
    assert sum(refused.values()) > 20
    assert len(refused) >= 2


def test_a_command_on_a_full_disk_ends_with_a_message_and_code_2_and_goes_on_later(
    small_disk: Path, tmp_path: Path, fake: SimpleNamespace
) -> None:
    rows = fake.rows(60)
    fake.write(tmp_path / "whole", rows, fake.manifest(), shard_tokens=100)
    parts = [part_directory(tmp_path / "store", part, 2) for part in range(2)]
    for part, path in enumerate(parts):
        fake.write(path, rows, fake.manifest(part=part, num_parts=2), shard_tokens=100)
    ballast = fill(small_disk, 12)
    command = [
        sys.executable,
        "-m",
        "eagle3lab",
        "store",
        "merge",
        str(small_disk / "store"),
        *map(str, parts),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == EXIT_USER_ERROR
    assert done.stderr.startswith("error: cannot write ")
    assert "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    ballast.unlink()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert fake.tree(small_disk / "store") == fake.tree(tmp_path / "whole")
