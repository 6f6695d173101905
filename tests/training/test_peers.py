"""Processes of one run that watch each other, here as threads with a real key-value store between them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
from torch.distributed import PrefixStore, TCPStore

from eagle3lab.config.errors import PeerLost, UserError
from eagle3lab.training import peer_watch
from eagle3lab.training.peer_watch import Peers, Place

Meet = Callable[..., Peers]


@pytest.fixture
def meet(monkeypatch: pytest.MonkeyPatch) -> Iterator[Meet]:
    """Makes rank r of n on a node; times are a small part of the real ones, and nothing ends the test's process."""
    for name, seconds in (("BEAT", 0.02), ("LOST", 1.5), ("BROKEN", 0.3), ("JOIN", 3.0), ("GRACE", 60.0)):
        monkeypatch.setattr(peer_watch, f"{name}_SECONDS", seconds)
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    made: list[Peers] = []
    on_sigterm = signal.getsignal(signal.SIGTERM)

    def make(rank: int, world_size: int = 2, node: int | None = None, local_rank: int = 0) -> Peers:
        client = TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=5))
        place = Place(rank, rank if node is None else node, local_rank, "host")
        made.append(Peers(PrefixStore("run", client), place, world_size, lambda: "the same with resume=true"))
        return made[-1]

    yield make
    signal.signal(signal.SIGTERM, on_sigterm)
    for peers in made:
        vanish(peers)
        peers._beating.join()


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def vanish(peers: Peers) -> None:
    """What the others see of a killed process: nothing more."""
    peers._done = True
    peers._stop.set()


def test_a_process_that_is_no_longer_heard_of_is_named_with_what_goes_on(
    meet: Meet, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = meet(0), meet(1)
    time.sleep(0.2)
    assert first.lost is None
    vanish(second)
    until(lambda: first.lost)
    printed = capsys.readouterr().err
    assert printed.startswith("error: rank 1 (node 1, host) has not been heard of for")
    assert "try: the same with resume=true" in printed


def test_what_a_collective_raises_is_replaced_by_its_cause(meet: Meet) -> None:
    first, second = meet(0), meet(1)
    until(lambda: first._places)
    vanish(second)
    with pytest.raises(PeerLost, match="rank 1") as caught:
        first.fail(RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer"))
    assert caught.value.exit_code == 1
    assert caught.value.told


def test_a_mistake_is_printed_once_and_told_to_the_other_nodes(
    meet: Meet, capsys: pytest.CaptureFixture[str]
) -> None:
    first, same_node, other_node, its_second = (
        meet(rank, 4, node=rank // 2, local_rank=rank % 2) for rank in range(4)
    )
    until(lambda: len(first._places) == len(its_second._places) == 3)
    mistake = UserError("no such file")
    same_node.fail(mistake)
    assert mistake.told is False
    until(lambda: all(p.lost for p in (first, other_node, its_second)))
    printed = capsys.readouterr().err
    assert printed == "error: rank 1 (node 0, host) ended: no such file\n"  # by the first of the other node


def test_a_mistake_that_all_processes_find_is_printed_by_one(meet: Meet) -> None:
    processes, mistakes = [meet(0), meet(1)], [UserError("bad value"), UserError("bad value")]
    for process, mistake in zip(processes, mistakes, strict=True):
        process._others = []  # nobody to wait for
        process.fail(mistake)
    assert [mistake.told for mistake in mistakes] == [False, True]


def test_one_that_never_comes_is_lost(meet: Meet) -> None:
    first = meet(0)
    until(lambda: first.lost)
    assert "rank 1 never came" in str(first.lost)


def test_one_that_has_left_is_not_lost(meet: Meet) -> None:
    first, second = meet(0), meet(1)
    until(lambda: first._places)
    second.leave()
    time.sleep(1.0)
    assert first.lost is None
    first.leave()


def test_the_first_waits_for_all_and_refuses_another_store(meet: Meet) -> None:
    first, second = meet(0), meet(1)
    until(lambda: first._places)
    second.agree({"store": "a", "run_dir": "x"})
    with pytest.raises(UserError, match=r"rank 1 .*has another store: 'a'; expected b"):
        first.agree({"store": "b", "run_dir": "x"})
    second.agree({"store": "b"})
    first.agree({"store": "b"})


def test_a_process_that_was_stopped_itself_judges_nobody_by_that_time(
    meet: Meet, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, later = time.monotonic, 0.0
    monkeypatch.setattr(peer_watch, "LOST_SECONDS", 4.0)
    monkeypatch.setattr(peer_watch.time, "monotonic", lambda: clock() + later)
    first, second = meet(0), meet(1)
    until(lambda: first._places)
    vanish(second)  # as it is stopped, too, and has not begun to beat again
    later = 100.0
    time.sleep(0.6)
    assert first.lost is None


def test_waiting_for_one_that_is_lost_ends(meet: Meet) -> None:
    first, second = meet(0), meet(1)
    until(lambda: first._places)
    vanish(second)
    with pytest.raises(PeerLost):
        first.agree({})
