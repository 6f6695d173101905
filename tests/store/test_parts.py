"""Parts of several machines, joined into the store of one."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest

import eagle3lab.store.merge as merge
from eagle3lab.config.errors import IntegrityError, UserError
from eagle3lab.store.manifest import read_manifest
from eagle3lab.store.merge import merge_parts, part_directory
from eagle3lab.store.reader import StoreReader


@pytest.fixture
def whole(tmp_path: Path, fake: SimpleNamespace) -> dict[str, bytes]:
    fake.write(tmp_path / "one_go", fake.rows(), fake.manifest())
    return fake.tree(tmp_path / "one_go")


def write_parts(tmp_path: Path, fake: SimpleNamespace, num_parts: int, **changes: object) -> list[Path]:
    paths = [part_directory(tmp_path / "store", part, num_parts) for part in range(num_parts)]
    for part, path in enumerate(paths):
        fake.write(path, fake.rows(), fake.manifest(part=part, num_parts=num_parts, **changes))
    return paths


@pytest.mark.parametrize("num_parts", [2, 3])
def test_joined_parts_are_byte_for_byte_the_store_of_one_run(
    tmp_path: Path, fake: SimpleNamespace, whole: dict, num_parts: int
) -> None:
    paths = write_parts(tmp_path, fake, num_parts)
    for order in itertools.islice(itertools.permutations(paths), 3):
        target = tmp_path / f"joined{len(list(tmp_path.iterdir()))}"
        merge_parts(order, target)
        assert fake.tree(target) == whole
    assert len(StoreReader(target, verify="full")) == len(fake.rows())


def test_every_row_is_in_exactly_one_part(tmp_path: Path, fake: SimpleNamespace, whole: dict) -> None:
    names = [set(fake.tree(path)) for path in write_parts(tmp_path, fake, 3)]
    shards = [{name for name in part if name.startswith("shards/")} for part in names]
    assert sum(map(len, shards)) == len(set().union(*shards))
    assert set().union(*shards) == {name for name in whole if name.startswith("shards/")}


def test_copies_serve_where_links_are_not_possible(
    tmp_path: Path, fake: SimpleNamespace, whole: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = write_parts(tmp_path, fake, 2)

    def no_link(*_: object) -> None:
        raise OSError("another file system")

    monkeypatch.setattr(merge.os, "link", no_link)
    merge_parts(paths, tmp_path / "joined")
    assert fake.tree(tmp_path / "joined") == whole


@pytest.mark.parametrize("stop_at", [1, 2, 4])
def test_an_interrupted_merge_goes_on(
    tmp_path: Path, fake: SimpleNamespace, whole: dict, monkeypatch: pytest.MonkeyPatch, stop_at: int
) -> None:
    paths, calls, place = write_parts(tmp_path, fake, 2), itertools.count(), merge._place

    def failing(*arguments: object) -> None:
        if next(calls) == stop_at:
            raise KeyboardInterrupt
        place(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(merge, "_place", failing)
    with pytest.raises(KeyboardInterrupt):
        merge_parts(paths, tmp_path / "joined")
    with pytest.raises(UserError, match="not finished"):
        StoreReader(tmp_path / "joined")
    monkeypatch.undo()
    merge_parts(paths, tmp_path / "joined")
    assert fake.tree(tmp_path / "joined") == whole


def test_missing_doubled_and_unfinished_parts_are_named_at_once(
    tmp_path: Path, fake: SimpleNamespace
) -> None:
    one, two, _ = write_parts(tmp_path, fake, 3)
    fake.write(tmp_path / "cut", fake.rows(), fake.manifest(part=1, num_parts=3), stop_before=1)
    with pytest.raises(UserError) as caught:
        merge_parts([one, one, tmp_path / "cut"], tmp_path / "joined")
    text = str(caught.value)
    assert "missing: [2]" in text
    assert "given twice: [0]" in text
    assert "cut is not finished" in text
    assert "extract.part=1 extract.num_parts=3" in text
    with pytest.raises(UserError, match="there is no part"):
        merge_parts([one, two, tmp_path / "nothing"], tmp_path / "joined")
    assert not (tmp_path / "joined").exists()


def test_parts_of_another_engine_or_plan_are_refused_with_both_values(
    tmp_path: Path, fake: SimpleNamespace
) -> None:
    one = write_parts(tmp_path, fake, 2)[0]
    other = tmp_path / "other"
    fake.write(other, fake.rows(11), fake.manifest(part=1, num_parts=2, engine={"name": "vllm"}))
    with pytest.raises(UserError) as caught:
        merge_parts([one, other], tmp_path / "joined")
    text = str(caught.value)
    assert all(name in text for name in ("another engine", "'vllm'", "transformers", "planned_rows_hash"))


def test_a_damaged_part_is_named_and_nothing_is_finished(tmp_path: Path, fake: SimpleNamespace) -> None:
    paths = write_parts(tmp_path, fake, 2)
    shard = next((paths[1] / "shards").iterdir())
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=rf"{shard.name}: sha256"):
        merge_parts(paths, tmp_path / "joined")
    assert not read_manifest(tmp_path / "joined").complete
    assert not list((tmp_path / "joined").rglob("*.tmp"))


def test_another_store_is_not_overwritten(tmp_path: Path, fake: SimpleNamespace) -> None:
    paths = write_parts(tmp_path, fake, 2)
    fake.write(tmp_path / "joined", fake.rows(5), fake.manifest())
    before = fake.tree(tmp_path / "joined")
    with pytest.raises(UserError, match="something else"):
        merge_parts(paths, tmp_path / "joined")
    assert fake.tree(tmp_path / "joined") == before


def test_a_part_is_not_read_as_a_store_and_says_what_to_do(tmp_path: Path, fake: SimpleNamespace) -> None:
    one = write_parts(tmp_path, fake, 2)[0]
    with pytest.raises(UserError, match=r"only part 0 of 2[\s\S]*store merge"):
        StoreReader(one)


def test_an_interrupted_part_resumes_to_the_same_bytes(tmp_path: Path, fake: SimpleNamespace) -> None:
    paths = write_parts(tmp_path, fake, 2)
    again = tmp_path / "again"
    manifest = fake.manifest(part=1, num_parts=2)
    fake.write(again, fake.rows(), manifest, stop_before=3)
    fake.write(again, fake.rows(), manifest)
    assert fake.tree(again) == fake.tree(paths[1])
    with pytest.raises(UserError, match="another part"):
        fake.write(again, fake.rows(), fake.manifest(part=0, num_parts=2))


def test_more_parts_than_shards_are_refused(tmp_path: Path, fake: SimpleNamespace) -> None:
    with pytest.raises(UserError, match=r"the plan has \d shards: 50"):
        fake.write(tmp_path, fake.rows(), fake.manifest(part=0, num_parts=50))
    assert not list(tmp_path.iterdir())
