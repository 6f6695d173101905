"""`VllmEngine` over runners that need no vllm: what lies in its scratch directory and when it is gone."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from eagle3lab.engines import vllm, vllm_files
from eagle3lab.engines.base import EngineError
from eagle3lab.engines.deadline import child_processes
from eagle3lab.engines.vllm import VllmRunner
from eagle3lab.engines.vllm_answers import VllmAnswerer
from eagle3lab.engines.vllm_engine import VllmEngine
from eagle3lab.engines.vllm_files import OWNER_FILE, Scratch
from eagle3lab.engines.vllm_settings import Decoding, VllmSettings

HIDDEN, LAYER_IDS, VOCAB = 8, (1, 2, 3), 32
BYTES_PER_TOKEN = len(LAYER_IDS) * HIDDEN * 4 + 16


class Runner:
    """Writes states that say their token id and layer; fails where a row begins with 0."""

    def __init__(self, directory: Path, name: str = "a", fails_to_close: bool = False) -> None:
        self.directory, self.name, self.fails_to_close = directory, name, fails_to_close
        self.num_files, self.asked, self.closed = 0, list[int](), False

    def ask(self, rows: Sequence[Sequence[int]]) -> list[str]:
        if any(row[0] == 0 for row in rows):
            raise EngineError("no answer")
        self.asked.append(len(rows))
        return [self._write(row) for row in rows]

    def _write(self, row: Sequence[int]) -> str:
        ids = torch.tensor(row)
        hidden = (ids[:, None] + 100 * torch.tensor(LAYER_IDS)).float()[:, :, None].expand(-1, -1, HIDDEN)
        self.num_files += 1
        path = self.directory / f"{self.name}{self.num_files}.safetensors"
        save_file({"hidden_states": hidden.contiguous(), "token_ids": ids}, path)
        return str(path)

    def close(self) -> None:
        self.closed = True
        if self.fails_to_close:
            raise EngineError("it does not end")


SETTINGS = VllmSettings(
    path=Path("verifier"),
    model_type="llama",
    layer_ids=LAYER_IDS,
    dtype="float32",
    device="cpu",
    max_len=64,
    batch_tokens=64,
    scratch=None,
    eos_token_ids=(1,),
    max_positions=64,
)
FACTS = SimpleNamespace(hidden_size=HIDDEN, vocab_size=VOCAB, num_layers=3)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    made = Scratch(tmp_path)
    yield made
    made.close()


def engine_over(scratch: Scratch, *runners: Runner) -> VllmEngine:
    return VllmEngine(runners, SETTINGS, FACTS, scratch)  # type: ignore[arg-type]


def mapped_files(scratch: Scratch) -> int:
    """Removed files of the directory that this process still maps, and that so still fill it."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return len({line.split()[4] for line in lines if str(scratch.path) in line})


@pytest.mark.parametrize(("free_tokens", "asked"), [(80, [4]), (20, [1, 1, 1, 1])])
def test_states_leave_the_directory_when_others_of_the_request_need_the_room(
    scratch: Scratch, monkeypatch: pytest.MonkeyPatch, free_tokens: int, asked: list[int]
) -> None:
    def disk_usage(_: object) -> SimpleNamespace:
        return SimpleNamespace(
            free=(free_tokens - 10 * mapped_files(scratch)) * BYTES_PER_TOKEN, total=80 * BYTES_PER_TOKEN
        )

    rows = [[2 + i, *range(3, 12)] for i in range(4)]
    runner = Runner(scratch.path)
    with monkeypatch.context() as patched:
        patched.setattr(vllm_files, "shutil", SimpleNamespace(disk_usage=disk_usage, rmtree=shutil.rmtree))
        states = engine_over(scratch, runner).capture(rows, (1, 2))
    assert runner.asked == asked
    for row, of_row in zip(rows, states, strict=True):
        ids = torch.tensor(row).float()
        assert of_row.token_ids.tolist() == row
        assert torch.equal(
            of_row.aux, torch.cat([(ids + k)[:, None].expand(-1, HIDDEN) for k in (100, 200)], 1)
        )
        assert torch.equal(of_row.last, (ids + 300)[:, None].expand(-1, HIDDEN))


def test_files_of_a_replica_are_removed_when_another_one_fails(scratch: Scratch) -> None:
    good, bad = Runner(scratch.path, "a"), Runner(scratch.path, "b")
    with pytest.raises(EngineError, match="no answer"):
        engine_over(scratch, good, bad).capture([[5, 6, 7], [0, 6], [4]], (1,))
    assert good.num_files
    assert [path.name for path in scratch.path.iterdir()] == [OWNER_FILE]


def test_every_runner_is_closed_and_the_directory_gone_when_one_fails_to_end(scratch: Scratch) -> None:
    runners = [Runner(scratch.path, fails_to_close=True), Runner(scratch.path), Runner(scratch.path)]
    with pytest.raises(EngineError, match="does not end"):
        engine_over(scratch, *runners).close()
    assert all(runner.closed for runner in runners)
    assert not scratch.path.exists()
    for runner in runners:
        runner.closed = False
    with pytest.raises(EngineError, match="does not end"):
        VllmAnswerer(runners, SETTINGS, FACTS).close()  # type: ignore[arg-type]
    assert all(runner.closed for runner in runners)


def test_files_of_a_request_that_lacks_one_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "states"
    file.write_text("x")
    outputs = [SimpleNamespace(kv_transfer_params=p) for p in ({"hidden_states_path": str(file)}, None)]
    monkeypatch.setattr(VllmRunner, "__init__", lambda self: None)
    monkeypatch.setattr(VllmRunner, "_generate", lambda self, rows, max_tokens: outputs)
    with pytest.raises(EngineError, match="named 1 files of states for 2 rows"):
        VllmRunner().ask([[1], [2]])  # type: ignore[call-arg]
    assert not file.exists()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_graphs_are_left_out_where_they_are_not_wanted(device: str) -> None:
    for decoding in (None, Decoding(4)):  # answers, decoding
        settings = replace(SETTINGS, device=device, layer_ids=(), decoding=decoding)
        assert settings.arguments()["enforce_eager"] is (device == "cpu")
        assert replace(settings, eager=True).arguments()["enforce_eager"] is True


def test_a_cache_of_a_given_size_is_not_measured() -> None:
    assert "kv_cache_memory_bytes" not in SETTINGS.arguments()
    assert replace(SETTINGS, cache_gib=0.5).arguments()["kv_cache_memory_bytes"] == 2**29


def test_an_engine_that_does_not_end_in_time_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    put_back: list[bool] = []
    monkeypatch.setattr(VllmRunner, "__init__", lambda self: None)
    monkeypatch.setattr(vllm, "CLOSE_SECONDS", 0.05)
    runner = VllmRunner()  # type: ignore[call-arg]
    core = SimpleNamespace(shutdown=lambda: time.sleep(0.5))
    runner._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))
    runner._spare = child_processes()
    runner._put_back = lambda: put_back.append(True)
    runner.close()
    assert put_back == [True]
    runner.close()
    assert put_back == [True]
