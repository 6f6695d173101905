from __future__ import annotations

import gzip
import json
import lzma
from pathlib import Path

import pytest

from eagle3lab.config.errors import UserError
from eagle3lab.rows.files import check_paths, read_file

RECORDS = [{"id": "a", "text": "one\u2028two\u0085three"}, {"id": "b", "text": "\ufeff inside"}]


def lines(records: list[dict[str, str]], newline: str = "\n") -> bytes:
    return "".join(json.dumps(r, ensure_ascii=False) + newline for r in records).encode()


def values(path: Path) -> list[object]:
    return [record.value for record in read_file(str(path))]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", lines(RECORDS)),
        ("a.jsonl", lines(RECORDS).rstrip(b"\n")),
        ("a.jsonl", b"\xef\xbb\xbf" + lines(RECORDS, "\r\n") + b"\r\n\n"),
        ("a.jsonl.gz", gzip.compress(lines(RECORDS), mtime=0)),
        ("a.jsonl.xz", lzma.compress(lines(RECORDS))),
        ("a.json", json.dumps(RECORDS, indent=1).encode()),
        ("a.json", b"\xef\xbb\xbf" + json.dumps(RECORDS).encode()),
        ("a.json.xz", lzma.compress(json.dumps(RECORDS).encode())),
        ("a.json", lines(RECORDS)),
    ],
)
def test_every_accepted_form_gives_the_same_records(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    assert values(tmp_path / name) == RECORDS


def test_a_source_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n" + lines(RECORDS))
    assert [record.source for record in read_file(str(path))] == [f"{path}:2", f"{path}:3"]


@pytest.mark.parametrize("bad", [b'{"id": 1', b'{"id": "\xff"}', b"nope"])
def test_a_malformed_line_carries_its_error_and_the_others_are_read(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 0}\n' + bad + b'\n{"id": 2}\n')
    records = list(read_file(str(path)))
    assert [record.error is None for record in records] == [True, False, True]
    assert records[1].source == f"{path}:2"


def test_a_broken_array_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"id": 1},\n{"id": 2},\n{"id": ]')
    (record,) = read_file(str(path))
    assert record.source == f"{path}:3"
    assert record.error


@pytest.mark.parametrize("name", ["a.jsonl.xz", "a.jsonl.gz"])
@pytest.mark.parametrize("cut", [True, False])
def test_a_damaged_archive_is_one_message(name: str, cut: bool, tmp_path: Path) -> None:
    compress = lzma.compress if name.endswith("xz") else gzip.compress
    data = compress(lines(RECORDS * 50)) if cut else b"this is no archive"
    (tmp_path / name).write_bytes(data[: len(data) // 2] if cut else data)
    with pytest.raises(UserError, match="cannot decompress"):
        values(tmp_path / name)


def test_all_unusable_paths_are_reported_together(tmp_path: Path) -> None:
    (tmp_path / "here.jsonl").write_text("")
    problems = check_paths([str(tmp_path / n) for n in ("here.jsonl", "gone.jsonl", "table.parquet")])
    assert ["gone" in str(p) or "parquet" in str(p) for p in problems] == [True, True]
    assert check_paths([])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"a": 1, "b": {"role": "x", "role": "y"}}', "the key 'role' stands twice"),
        ('{"a": NaN}', "NaN is no JSON value"),
        ("[" * 150 + "]" * 150, "nested more than 100 deep"),
        ("[" * 100_000 + "]" * 100_000, "nested"),
    ],
)
def test_json_that_readers_take_in_different_ways_is_malformed(line: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text('{"ok": [[[1]]]}\n' + line + "\n")
    good, bad = read_file(str(path))
    assert good.error is None
    assert says in str(bad.error)


@pytest.mark.parametrize(
    ("between", "whole"), [(b"", True), (b"\0" * 8, True), (b"no stream", False), (b"\xfe", False)]
)
def test_every_stream_of_an_archive_is_read_or_the_file_is_refused(
    between: bytes, whole: bool, tmp_path: Path
) -> None:
    first, second = (lzma.compress(lines([record] * 3000)) for record in RECORDS)
    path = tmp_path / "a.jsonl.xz"
    path.write_bytes(first + between + second + b"\0" * 4)
    if whole:
        assert values(path) == [record for record in RECORDS for _ in range(3000)]
    else:
        with pytest.raises(UserError, match="cannot decompress"):
            values(path)


@pytest.mark.parametrize("bad", [b"[1, 2]\n", b"\n[[1]]\n", b"[" * 100_000 + b"]" * 100_000 + b"\n"])
def test_a_list_in_the_first_line_costs_no_other_line(bad: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(bad + lines(RECORDS))
    read = list(read_file(str(path)))
    assert [record.value for record in read[1:]] == RECORDS
    assert [record.source.rpartition(":")[2] for record in read] == (
        ["2", "3", "4"] if bad.startswith(b"\n") else ["1", "2", "3"]
    )


def test_an_array_after_blank_lines_is_an_array_and_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_bytes(b"\r\n\n" + json.dumps(RECORDS, indent=1).encode())
    assert values(path) == RECORDS
    path.write_text('\n\n[{"id": 1},\n{"id": ]')
    assert [record.source for record in read_file(str(path))] == [f"{path}:4"]
