"""What surrounds vLLM and needs none: files, answers of workers, shares, replicas, deadlines."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from eagle3lab.config.errors import EXIT_USER_ERROR, IntegrityError, UserError
from eagle3lab.config.schema import Backend
from eagle3lab.engines import replicas, vllm_files
from eagle3lab.engines.base import EngineDied, EngineError
from eagle3lab.engines.deadline import child_processes, deadline
from eagle3lab.engines.replicas import RemoteRunner, device_groups
from eagle3lab.engines.vllm_engine import share_out
from eagle3lab.engines.vllm_files import Scratch, take_file, to_states
from eagle3lab.engines.vllm_worker import CaptureExtension, rank_zero

HIDDEN = 8
OURS = {"rank": 0, "tag": 4, "num_tokens": 3}


@pytest.mark.parametrize(
    "answer", [OURS, [OURS], (OURS,), [OURS, {**OURS, "rank": 1}], [{**OURS, "rank": 1}, OURS], [OURS, None]]
)
def test_a_list_per_worker_and_the_value_itself_are_the_same_answer(answer):
    assert rank_zero(answer, 4) == OURS


@pytest.mark.parametrize("answer", [None, [], [None], [{**OURS, "rank": 1}], [OURS, OURS], "text", 3])
def test_an_answer_without_exactly_one_rank_zero_is_an_error(answer):
    with pytest.raises(ValueError, match="worker call returned"):
        rank_zero(answer, 4)


def test_the_reply_to_an_earlier_call_is_an_error():
    with pytest.raises(ValueError, match="call 5 was answered by the reply to call 4"):
        rank_zero([OURS], 5)


def captured(num_tokens=5, num_ids=3):
    hidden = torch.arange(num_tokens * num_ids * HIDDEN, dtype=torch.float32)
    return {
        "hidden_states": hidden.reshape(num_tokens, num_ids, HIDDEN),
        "token_ids": torch.arange(num_tokens),
    }


def test_slots_come_in_the_order_asked_for_and_the_last_state_is_the_highest_id():
    tensors = captured()
    states = to_states(tensors, (2, 4, 6), (2, 4), HIDDEN)
    assert torch.equal(states.aux, tensors["hidden_states"][:, :2].flatten(1))
    assert states.aux.data_ptr() == tensors["hidden_states"].data_ptr()  # no copy on the way
    assert torch.equal(states.last, tensors["hidden_states"][:, 2])
    swapped = to_states(tensors, (2, 4, 6), (4, 2), HIDDEN)
    assert torch.equal(swapped.aux[:, :HIDDEN], tensors["hidden_states"][:, 1])


@pytest.mark.parametrize("ids", [(2, 6), (1, 2, 4, 6)])
def test_another_number_of_layers_is_refused(ids):
    with pytest.raises(IntegrityError, match="another form"):
        to_states(captured(), ids, ids[:-1], HIDDEN)


def write_under_lock(path: Path, seconds: float, content=None) -> threading.Thread:
    lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)

    def write():
        if content is not None:
            path.write_bytes(b"half")
            time.sleep(seconds)
            save_file(content, path)
        os.close(lock)

    thread = threading.Thread(target=write)
    thread.start()
    return thread


def test_a_file_is_read_when_its_writer_is_done_and_then_removed(tmp_path):
    path = tmp_path / "a.safetensors"
    thread = write_under_lock(path, 0.1, captured())
    tensors = take_file(path, 5.0)
    assert torch.equal(tensors["hidden_states"], captured()["hidden_states"])
    thread.join()
    assert not list(tmp_path.iterdir())


def test_a_writer_that_ends_without_a_file_is_an_error_at_once(tmp_path):
    write_under_lock(tmp_path / "a", 0.0).join()
    with pytest.raises(EngineError, match="without writing"):
        take_file(tmp_path / "a", 60.0)


def test_a_file_that_never_comes_is_an_error_in_time(tmp_path):
    with pytest.raises(EngineError, match="no states in"):
        take_file(tmp_path / "a", 0.05)


def test_a_cut_file_is_an_error_and_is_removed(tmp_path):
    (tmp_path / "a").write_bytes(b"\x10" * 40)
    with pytest.raises(EngineError, match="cannot be read"):
        take_file(tmp_path / "a", 1.0)
    assert not list(tmp_path.iterdir())


def test_a_scratch_directory_goes_with_its_owner_even_when_it_was_killed(tmp_path):
    own = Scratch(tmp_path)
    program = (
        "import os, pathlib, sys\nfrom eagle3lab.engines.vllm_files import Scratch\n"
        "s = Scratch(pathlib.Path(sys.argv[1])); (s.path / 'x').write_text('x'); os._exit(9)"
    )
    root = Path(__file__).resolve().parents[2]
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(root)},
        check=False,
    )
    assert len(list(tmp_path.iterdir())) == 2
    other = Scratch(tmp_path)
    assert set(tmp_path.iterdir()) == {own.path, other.path}
    own.close()
    other.close()
    assert not list(tmp_path.iterdir())


def test_rows_get_half_of_what_is_free_and_not_kept_for_others(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_files, "ROOM_SECONDS", 0.05)
    monkeypatch.setattr(vllm_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=2000, total=2000))
    scratch = Scratch(tmp_path)
    with scratch.room_for([40, 50, 20, 100, 1], 10) as count:
        assert count == 2
        with scratch.room_for([50, 5, 1], 10) as beside:  # half of what the first left
            assert beside == 2
        with (
            pytest.raises(UserError, match=r"(?s)56 tokens need 560 bytes.*scratch_dir"),
            scratch.room_for([56], 10),
        ):
            pass
    with scratch.room_for([56], 10) as count:
        assert count == 1
    with pytest.raises(UserError, match="101 tokens need 1,010 bytes"), scratch.room_for([101], 10):
        pass
    scratch.close()


def test_a_row_waits_for_room_that_another_request_keeps(tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_files.shutil, "disk_usage", lambda _: SimpleNamespace(free=2000, total=2000))
    scratch = Scratch(tmp_path)
    order = []

    def second():
        with scratch.room_for([90], 10):
            order.append("second")

    with scratch.room_for([90], 10):
        waiting = threading.Thread(target=second)
        waiting.start()
        time.sleep(0.3)
        order.append("first")
    waiting.join(10)
    assert order == ["first", "second"]
    scratch.close()


def test_a_scratch_directory_that_cannot_be_made_is_a_user_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="scratch_dir"):
        Scratch(tmp_path / "file")


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_a_user_error_and_keeps_nothing_of_this_run(
    tmp_path, monkeypatch, number
):
    left = tmp_path / f"{vllm_files.PREFIX}left"  # by a process that was killed, or by one of another node
    left.mkdir()
    (left / vllm_files.OWNER_FILE).write_text("")

    def flock(descriptor, operation):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(vllm_files.fcntl, "flock", flock)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UserError) as found:
        Scratch(tmp_path)
    (problem,) = found.value.problems
    assert problem.value == f"{tmp_path} ({os.strerror(number)})"
    assert "locked (flock)" in problem.expected
    assert problem.fix == "extract.scratch_dir=DIRECTORY"
    assert found.value.exit_code == EXIT_USER_ERROR == 2
    assert list(tmp_path.iterdir()) == [left]  # whether its owner lives cannot be known
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_shares_hold_every_row_once_and_like_numbers_of_tokens():
    lengths = [100, 5, 60, 50, 40, 9]
    shares = share_out(lengths, 2)
    assert sorted(i for share in shares for i in share) == list(range(6))
    tokens = [sum(lengths[i] for i in share) for share in shares]
    assert abs(tokens[0] - tokens[1]) <= 20
    assert all(share == sorted(share) for share in shares)


def test_replicas_get_devices_of_their_own():
    assert device_groups(None, 8, 2, 3) == ["0,1", "2,3", "4,5"]
    assert device_groups("4,5,6,7", 4, 2, 2) == ["4,5", "6,7"]
    with pytest.raises(UserError, match="needs 8 devices"):
        device_groups(None, 4, 4, 2)


def test_a_replica_answers_fails_and_is_ended_when_it_hangs(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setattr(replicas, "GRACE_SECONDS", 60.0)
    from fake_runner import FakeRunner

    allowed = [60.0]
    runner = RemoteRunner(
        FakeRunner,
        "S",
        {"CUDA_VISIBLE_DEVICES": "5"},
        start_seconds=60.0,
        answer_seconds=lambda _: allowed[0],
    )
    runner.wait_ready()
    assert runner.versions() == {"devices": "5", "settings": "S"}
    assert runner.ask([[9, 9], [8]]) == ["file-2", "file-1"]
    with pytest.raises(EngineError, match="no answer for this one"):
        runner.ask([[1]])
    with pytest.raises(UserError, match=r"no room: '7'; expected more"):
        runner.ask([[2]])
    monkeypatch.setattr(replicas, "GRACE_SECONDS", 0.0)
    allowed[0] = 0.2
    with pytest.raises(EngineDied, match="longer than 0 s; the replica was ended"):
        runner.ask([[3]])
    with pytest.raises(EngineDied, match="exit code"):
        runner.ask([[9]])
    runner.close()
    assert not runner._process.is_alive()


def test_calls_to_a_replica_from_several_threads_get_each_its_own_answer(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    from fake_runner import FakeRunner

    counted = []

    def answer_seconds(num_tokens):
        counted.append(num_tokens)
        return 60.0

    runner = RemoteRunner(FakeRunner, "S", {}, start_seconds=60.0, answer_seconds=answer_seconds)
    runner.wait_ready()
    slow_first = [[[4, 300 - i], [9] * i] for i in range(1, 9)]  # the first to be asked is the last to answer
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(runner.ask, slow_first))
    assert answers == [["file-2", f"file-{i}"] for i in range(1, 9)]
    # a call may wait for the tokens of those before it, and the last for all of them
    assert max(counted) == sum(len(row) for rows in slow_first for row in rows)
    runner.close()
    assert not runner._process.is_alive()


def test_a_deadline_ends_the_processes_that_were_started_since_and_no_other():
    context = multiprocessing.get_context("fork")
    spared = context.Process(target=time.sleep, args=(60,))
    spared.start()
    spare = child_processes()
    hung = context.Process(target=time.sleep, args=(60,))
    hung.start()

    def wait():
        hung.join()
        raise RuntimeError("the engine is gone")

    with (
        pytest.raises(EngineDied, match="a request took longer than 0 s"),
        deadline(0.1, "a request", spare=spare),
    ):
        wait()
    assert spared.is_alive()
    spared.kill()
    spared.join()
    with pytest.raises(RuntimeError, match="own failure"), deadline(60.0, "a request", spare=spare):
        raise RuntimeError("own failure")


def test_a_deadline_can_stop_a_loop_in_this_process():
    running = [True]

    def loop():
        while running[0]:
            time.sleep(0.01)
        raise TimeoutError("told to stop")

    with (
        pytest.raises(EngineDied, match="a request took longer"),
        deadline(
            0.1,
            "a request",
            spare=child_processes(),
            wake=lambda: running.clear() or running.append(False),
        ),
    ):
        loop()


class Block(torch.nn.Module):
    """A decoder layer in vLLM's form: (positions, hidden, residual) -> (hidden, residual)."""

    def forward(self, hidden, residual):
        residual = hidden if residual is None else hidden + residual
        return residual * 0.5, residual


class Norm(torch.nn.Module):
    def forward(self, hidden, residual):
        total = hidden + residual
        return total / 2, total


class Decoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed_tokens = torch.nn.Embedding(20, HIDDEN)
        self.layers = torch.nn.ModuleList(Block() for _ in range(3))
        self.norm = Norm()

    def forward(self, ids):
        hidden, residual = self.embed_tokens(ids), None
        for layer in self.layers:
            hidden, residual = layer(hidden, residual)
        return self.norm(hidden, residual)[0]


class Scheduled:
    def __init__(self, n):
        self.total_num_scheduled_tokens = n


class ModelRunner:
    def __init__(self):
        self.model = torch.nn.Module()
        self.model.inner = Decoder()

    def execute_model(self, scheduled, ids):
        with torch.no_grad():
            return self.model.inner(ids)


def test_hooks_record_layers_norm_and_token_ids_over_chunks_without_padding(tmp_path):
    from safetensors.torch import load_file

    worker = CaptureExtension()
    worker.model_runner, worker.rank = ModelRunner(), 0
    assert worker.eagle3lab_record(1, [1, 3]) == {"rank": 0, "tag": 1, "num_layers": 3}
    ids = torch.tensor([3, 4, 5, 6, 7])
    worker.model_runner.model.inner(ids)  # a warm-up: nothing is scheduled
    worker.model_runner.execute_model(Scheduled(3), torch.tensor([3, 4, 5, 0]))
    worker.model_runner.execute_model(Scheduled(2), torch.tensor([6, 7]))
    path = tmp_path / "r"
    assert worker.eagle3lab_save(2, str(path)) == {"rank": 0, "tag": 2, "num_tokens": 5}
    seen = load_file(path)
    embedded = worker.model_runner.model.inner.embed_tokens(ids).detach()
    assert torch.equal(seen["token_ids"], ids)
    torch.testing.assert_close(seen["layer_1"], embedded * 1.5)
    torch.testing.assert_close(seen["layer_3"], embedded * 1.5**3)
    torch.testing.assert_close(seen["pre_norm"], embedded * 1.5**3)
    torch.testing.assert_close(seen["post_norm"], embedded * 1.5**3 / 2)
    assert "execute_model" not in vars(worker.model_runner)  # nothing is left behind
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in worker.model_runner.model.modules())


@pytest.mark.parametrize(
    ("backend", "device", "installed", "want"),
    [
        (Backend.auto, "cuda", True, Backend.vllm),
        (Backend.auto, "cuda", False, Backend.hf),
        (Backend.auto, "cpu", True, Backend.hf),
        (Backend.vllm, "cpu", False, Backend.vllm),
        (Backend.hf, "cuda", True, Backend.hf),
    ],
)
def test_auto_is_vllm_where_it_is_installed_and_a_gpu_is_there(monkeypatch, backend, device, installed, want):
    from eagle3lab.engines import select

    monkeypatch.setattr(select, "is_installed", lambda: installed)
    assert select.pick_backend(backend, device) is want
