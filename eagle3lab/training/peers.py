"""The processes of one run end together: when one fails or is no longer heard of, the others end with its message.

A collective waits for a lost process until its own timeout, half an hour; before the process group exists nothing
waits at all. So every process counts up a number in torch's key-value store, from the moment it knows its place in
the run, and looks at those of the others. Clocks of nodes are never compared.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from eagle3lab.config.errors import Problem, StoppedBySignal, UserError

from .peer_watch import JOIN_SECONDS, Peers, Place

_run: _Run | None = None
_num_meetings = 0  # of this process; the same on all, so that the trials of a sweep have keys of their own


class _Run:
    def __init__(self) -> None:
        self.peers: Peers | None = None
        self.resume_command: Callable[[], str] = lambda: ""


@contextmanager
def together() -> Iterator[None]:
    """Around one run. What is raised in it ends the run of the processes it met, with one message.

    Raises `PeerLost` in place of what a collective raises when another process is gone. An error that another
    process has printed already has `told` set.
    """
    global _run
    _run = _Run()
    try:
        yield
    except StoppedBySignal:  # on all of them
        if _run.peers:
            _run.peers.leave()
        raise
    except BaseException as error:
        if _run.peers:
            _run.peers.fail(error)
        raise
    else:
        if _run.peers:
            _run.peers.leave()
    finally:
        _run = None


def meet(
    *,
    rank: int,
    world_size: int,
    node: int,
    local_rank: int,
    address: str,
    port: int,
) -> bool:
    """Find the other processes of the run, once; they are watched until the `together` around it ends.

    Does nothing for a single process, and outside of `together`. Returns whether there is a watch. Raises `UserError`
    when the first process cannot be reached.
    """
    global _num_meetings
    if _run is None or _run.peers is not None or world_size == 1:
        return _run is not None and _run.peers is not None
    from datetime import timedelta

    from torch.distributed import DistError, PrefixStore, TCPStore

    agent_has_it = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    try:
        store = TCPStore(
            address,
            port,
            is_master=rank == 0 and not agent_has_it,
            timeout=timedelta(seconds=JOIN_SECONDS),
            wait_for_workers=False,
            multi_tenant=True,  # the process group will open its own at the same place
        )
    except DistError as error:
        raise UserError(
            Problem(
                f"rank {rank} cannot {'listen' if rank == 0 else 'reach the first process'} at {address}:{port}",
                str(error).splitlines()[0],
                "an address of the first node that every node reaches, and a free port",
                "MASTER_ADDR and MASTER_PORT in the environment, or torchrun's --rdzv_endpoint",
            )
        ) from error
    run = _run
    own = Place(rank, node, local_rank, socket.gethostname())
    _run.peers = Peers(
        PrefixStore(f"eagle3lab/{_num_meetings}", store), own, world_size, lambda: run.resume_command()
    )
    _num_meetings += 1
    return True


def agree(facts: Mapping[str, str]) -> None:
    """The first process waits here until all have come, and compares what they are about to do.

    Nothing is written before: a node that does not see the store, or sees another one, leaves no trace of a run.
    Raises `UserError` where another process has other `facts`, `PeerLost` where one has ended.
    """
    if _run is not None and _run.peers is not None:
        _run.peers.agree(dict(facts))


def set_resume_command(command: Callable[[], str]) -> None:
    """What to type after a loss; empty as long as nothing is saved."""
    if _run is not None:
        _run.resume_command = command
