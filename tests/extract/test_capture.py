"""The pipeline of a capture: what may overlap, what must not, and that the bytes do not depend on it."""

from __future__ import annotations

import io
import threading
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from eagle3lab.config.errors import Problem, UserError
from eagle3lab.engines.base import States
from eagle3lab.extract import capture as capture_module
from eagle3lab.extract.capture import capture_shards
from eagle3lab.extract.progress import CaptureProgress
from eagle3lab.extract.report import ExtractReport
from eagle3lab.rows.rows import Row
from eagle3lab.store.identity import row_id_of
from eagle3lab.store.manifest import Manifest, VerifierIdentity
from eagle3lab.store.reader import StoreReader
from eagle3lab.store.writer import StoreWriter

HIDDEN, LAYER_IDS = 4, (1, 2)
MANIFEST = Manifest(
    verifier=VerifierIdentity("Fake", "c", "w", HIDDEN, 4, 100, "fake"),
    tokenizer_hash="t",
    template_hash="t",
    template_args_hash="t",
    layer_ids=LAYER_IDS,
    dtype="bfloat16",
    engine={},
    accounting={},
)


def make_rows(count, length=10):
    rows = []
    for i in range(count):
        ids, mask = (i + 1,) * length, (0,) * (length - 2) + (1, 1)
        row_id = row_id_of(torch.tensor(ids), torch.tensor(mask, dtype=torch.uint8))
        rows.append(Row(row_id, f"c{i}", f"f:{i}", "train", ids, mask))
    return rows


class FakeEngine:
    """States that name their token; schedules by itself, like a serving engine."""

    name, pads, concurrency = "fake", False, 2

    def __init__(self):
        self.requests = []
        self.lock = threading.Lock()

    def capture(self, rows, layer_ids):
        with self.lock:
            self.requests.append([row[0] for row in rows])
        return [self.states(row, len(layer_ids)) for row in rows]

    @staticmethod
    def states(row, num_layers):
        ids = torch.tensor(row)
        value = ids[:, None].float()
        return States(ids, value.expand(-1, num_layers * HIDDEN).clone(), value.expand(-1, HIDDEN).clone())


def run(path, rows, engine, *, shard_tokens=20):
    report = ExtractReport(path, len(rows), 0, 0)
    with (
        StoreWriter(path, MANIFEST, rows, shard_tokens) as writer,
        CaptureProgress(Console(file=io.StringIO()), 1) as progress,
    ):
        capture_shards(
            engine, writer, LAYER_IDS, batch_tokens=64, store_dtype=torch.bfloat16, report=report,
            progress=progress,
        )  # fmt: skip
        if not report.lost:
            writer.finish()
    return report


def tree(store):
    return {str(p.relative_to(store)): p.read_bytes() for p in sorted(store.rglob("*")) if p.is_file()}


@pytest.fixture
def small_requests(monkeypatch):
    """One shard of 20 tokens per request."""
    monkeypatch.setattr(capture_module, "REQUEST_BYTES", 20 * 3 * HIDDEN * 2)


def test_an_engine_that_schedules_by_itself_is_asked_for_several_shards_at_once(tmp_path):
    engine = FakeEngine()
    report = run(tmp_path / "store", make_rows(12), engine)
    assert engine.requests == [list(range(1, 13))]
    assert report.num_captured_rows == 12
    assert set(report.seconds) == {"capture", "write"}
    assert len(StoreReader(tmp_path / "store", verify="full")) == 12


def test_a_request_holds_no_more_states_than_its_bytes(tmp_path, small_requests):
    engine = FakeEngine()
    run(tmp_path / "store", make_rows(12), engine)
    assert sorted(engine.requests) == [[i, i + 1] for i in range(1, 13, 2)]


def test_the_engine_works_while_a_shard_is_written(tmp_path, small_requests, monkeypatch):
    third_request = threading.Event()

    class Engine(FakeEngine):
        def capture(self, rows, layer_ids):
            if rows[0][0] >= 5:
                third_request.set()
            return super().capture(rows, layer_ids)

    write_shard = StoreWriter.write_shard

    def write(self, number, states):
        assert number or third_request.wait(20), "the engine waited for the disk"
        write_shard(self, number, states)

    monkeypatch.setattr(StoreWriter, "write_shard", write)
    run(tmp_path / "store", make_rows(12), Engine())
    assert third_request.is_set()


def test_shards_written_out_of_order_give_the_same_bytes(tmp_path, small_requests, monkeypatch):
    rows = make_rows(12)

    class OneByOne(FakeEngine):
        concurrency = 1

    monkeypatch.setattr(capture_module, "WRITE_THREADS", 1)
    run(tmp_path / "whole", rows, OneByOne())
    monkeypatch.setattr(capture_module, "WRITE_THREADS", 4)
    written = threading.Event()
    write_shard = StoreWriter.write_shard

    def write(self, number, states):
        if number == 0:
            written.wait(20)
        write_shard(self, number, states)
        written.set()

    monkeypatch.setattr(StoreWriter, "write_shard", write)
    monkeypatch.setattr(capture_module, "REQUEST_BYTES", 10**9)
    run(tmp_path / "store", rows, FakeEngine())
    assert written.is_set()
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")


def test_a_failed_write_ends_the_run_and_what_is_indexed_stays(tmp_path, small_requests, monkeypatch):
    rows = make_rows(40)
    run(tmp_path / "whole", rows, FakeEngine())
    write_shard = StoreWriter.write_shard

    def write(self, number, states):
        if number == 3:
            raise UserError(Problem("disk full"))
        write_shard(self, number, states)

    engine = FakeEngine()
    with monkeypatch.context() as patch:
        patch.setattr(StoreWriter, "write_shard", write)
        with pytest.raises(UserError, match="disk full"):
            run(tmp_path / "store", rows, engine)
    assert len(engine.requests) < 20  # not everything was captured for nothing
    report = run(tmp_path / "store", rows, FakeEngine())
    assert 0 < report.num_captured_rows < 40
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")


def test_a_row_that_fails_twice_by_itself_is_lost_and_the_others_of_its_request_are_kept(tmp_path):
    rows = make_rows(12)
    run(tmp_path / "whole", rows, FakeEngine())

    class Failing(FakeEngine):
        def capture(self, rows, layer_ids):
            if any(row[0] == 4 for row in rows):
                self.requests.append([row[0] for row in rows])
                raise RuntimeError("no answer")
            return super().capture(rows, layer_ids)

    engine = Failing()
    report = run(tmp_path / "store", rows, engine)
    assert list(report.lost.values()) == ["RuntimeError: no answer"]
    assert engine.requests.count([4]) == 2
    assert report.num_captured_rows == 11
    again = run(tmp_path / "store", rows, engine := FakeEngine())
    assert engine.requests == [[4]]
    assert again.num_captured_rows == 1
    assert tree(tmp_path / "store") == tree(tmp_path / "whole")


def test_what_a_broken_engine_was_already_asked_is_counted_and_kept(tmp_path, small_requests):
    started = threading.Event()

    class Failing(FakeEngine):
        def capture(self, rows, layer_ids):
            number = (rows[0][0] - 1) // 2  # of the shard
            if number < 3:
                assert number < 2 or started.wait(20)
                raise RuntimeError("no answer")
            started.set()
            return super().capture(rows, layer_ids)

    report = run(tmp_path / "store", make_rows(12), engine := Failing())
    asked = sorted({token for request in engine.requests for token in request})
    assert asked[:2] == [7, 8]
    assert len(report.lost) == 6
    assert report.num_captured_rows == len(asked)
    again = run(tmp_path / "store", make_rows(12), FakeEngine())
    assert again.num_captured_rows == 12 - len(asked)


def test_states_that_are_not_finite_are_refused_from_the_writing_thread(tmp_path):
    class Broken(FakeEngine):
        def capture(self, rows, layer_ids):
            states = super().capture(rows, layer_ids)
            states[1] = replace(states[1], last=states[1].last * float("nan"))
            return states

    with pytest.raises(UserError, match="NaN"):
        run(tmp_path / "store", make_rows(6), Broken())
