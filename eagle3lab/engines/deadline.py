"""A bound on how long an engine may stay silent."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

from eagle3lab.engines.base import EngineDied


def child_processes() -> set[BaseProcess]:
    """The processes that this one started through multiprocessing and that still run."""
    return set(multiprocessing.active_children())


@contextmanager
def deadline(
    seconds: float, what: str, *, spare: set[BaseProcess], on_expiry: Callable[[], None] | None = None
) -> Iterator[None]:
    """End every child process but those to `spare` when the block takes longer than `seconds`.

    A caller that waits for an engine in a child process then gets the engine's own failure, which leaves
    here as `EngineDied`. Work of this very process cannot be ended from a thread: `on_expiry` may make its
    next step fail.
    """
    expired = threading.Event()

    def end() -> None:
        expired.set()
        if on_expiry is not None:
            on_expiry()
        for child in child_processes() - spare:
            child.kill()

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except BaseException as error:
        if expired.is_set():
            raise EngineDied(_late(what, seconds)) from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():  # done at the last moment, but its processes are gone
        raise EngineDied(_late(what, seconds))


def _late(what: str, seconds: float) -> str:
    return f"{what} took longer than {seconds:,.0f} s; the engine's processes were ended"
