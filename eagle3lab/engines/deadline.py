"""A bound on how long an engine may stay silent, and an eye on whether it still lives."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from eagle3lab.engines.base import EngineDied

POLL_SECONDS = 0.2


def child_processes() -> set[BaseProcess]:
    """The processes that this one started through multiprocessing and that still run."""
    return set(multiprocessing.active_children())


@contextmanager
def deadline(
    seconds: float,
    what: str,
    *,
    spare: set[BaseProcess],
    wake: Callable[[], None] | None = None,
    may_end: bool = False,
) -> Iterator[None]:
    """End every child process but those to `spare` when the block takes longer than `seconds`.

    The same happens as soon as one of them ends by itself (killed for memory, say), unless `may_end`.
    The block then fails as `EngineDied`. `wake` must make a call fail that waits in this thread: the
    death of a process does not wake whoever waits for its answer.
    """
    done = threading.Event()
    reasons: list[str] = []
    watched = child_processes() - spare
    end = time.monotonic() + seconds

    def watch() -> None:
        while not done.wait(min(POLL_SECONDS, max(0.0, end - time.monotonic()))):
            if time.monotonic() >= end:
                reasons.append(f"{what} took longer than {seconds:,.0f} s; the engine's processes were ended")
            elif not may_end and watched - child_processes():
                reasons.append(f"{what} failed: a process of the engine ended (out of memory?)")
            if reasons:
                for child in child_processes() - spare:
                    child.kill()
                if wake is not None:
                    wake()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        if reasons:
            raise EngineDied(reasons[0]) from error
        raise
    finally:
        done.set()
        watcher.join()
    if reasons:  # done at the last moment, but its processes are gone
        raise EngineDied(reasons[0])
