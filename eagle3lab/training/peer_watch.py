"""One process's watch over the others of its run: who fails, who is no longer heard of, and what is said of it."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from eagle3lab.config.errors import PeerLost, Problem, UserError, raise_all

BEAT_SECONDS = 1.0
LOST_SECONDS = 35.0  # without a beat
BROKEN_SECONDS = 6.0  # without a beat, once a collective has failed
JOIN_SECONDS = 600.0  # that a process may come later than another: nodes import from a busy file system
PAUSE_SECONDS = 5.0  # without a judgement: this process was stopped itself, as SLURM's suspend stops all
GRACE_SECONDS = 8.0  # for the main thread, which may be stuck in a collective, to end by itself
_ENDED, _LEFT = "ended:", "left"


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    rank: int
    node: int
    local_rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} (node {self.node}, {self.host})"


class Peers:
    """This process among those of the run. One thread talks to the store, which may block; one judges."""

    def __init__(self, store: Any, own: Place, world_size: int, resume_command: Callable[[], str]) -> None:
        self._store, self._own, self._resume_command = store, own, resume_command
        self._others = [r for r in range(world_size) if r != own.rank]
        self._places: dict[int, Place] = {}
        self._last_word: str | None = None
        self._num_agreed = 0
        self._words: dict[int, str] = {}
        now = time.monotonic()
        self._heard = dict.fromkeys(self._others, now + JOIN_SECONDS - LOST_SECONDS)
        self._round = now  # when the store last answered
        self._store_failed = self._broken = self._done = False
        self._end_at: tuple[float, int] | None = None
        self.lost: PeerLost | None = None
        place = json.dumps([own.rank, own.node, own.local_rank, own.host])
        store.set(f"place/{own.rank}", place)
        store.set(f"word/{own.rank}", "0")
        self._stop = threading.Event()
        self._beating = threading.Thread(target=self._beat, daemon=True, name="peers-beat")
        self._beating.start()
        threading.Thread(target=self._judge, daemon=True, name="peers-judge").start()

    def agree(self, facts: dict[str, str]) -> None:
        """See `peers.agree`."""
        self._num_agreed += 1
        key = f"facts{self._num_agreed}"
        self._store.set(f"{key}/{self._own.rank}", json.dumps(facts))
        for r in self._others if self._own.rank == 0 else ():
            while not self._store.check([f"{key}/{r}"]):
                if self.lost is not None:
                    raise self.lost
                time.sleep(0.1)
            theirs = json.loads(self._store.get(f"{key}/{r}"))
            raise_all(
                [
                    Problem(
                        f"{self._places.get(r, f'rank {r}')} has another {name}",
                        theirs.get(name),
                        f"{value} as rank 0 has",
                        "the same command, installation and files on every node",
                    )
                    for name, value in facts.items()
                    if theirs.get(name) != value
                ]
            )

    def leave(self) -> None:
        """The end of a run. The first process stays until all have left: it may hold the store."""
        self._finish(_LEFT, 10.0 if self._own.rank == 0 else 0.0)
        self._done = True

    def fail(self, error: BaseException) -> None:
        """Tell the others of `error`, or raise what happened to them; sets `error.told` of a `UserError`.

        The process ends within a minute from now, whatever waits for the others at its exit.
        """
        code = getattr(error, "exit_code", 1)
        if threading.current_thread() is threading.main_thread():
            # torchrun ends this process when its own rendezvous is gone, which may be before it has said why it ends
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._broken = self.lost is None and _is_of_a_collective(error)
        if self._broken:
            deadline = time.monotonic() + LOST_SECONDS + 2 * BEAT_SECONDS
            while self.lost is None and time.monotonic() < deadline:
                time.sleep(0.1)
        if self.lost is not None:
            raise self.lost from None
        text = error.render() if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        if isinstance(error, UserError):
            with suppress(Exception):
                error.told = self._store.add(f"said/{text}", 1) > 1
        self._end_at = time.monotonic() + GRACE_SECONDS + 30.0, code
        self._finish(_ENDED + text, 5 * BEAT_SECONDS)

    def _finish(self, word: str, seconds: float) -> None:
        """Say a last word, and stay until all others have had one too, at most so long."""
        self._last_word = word
        with suppress(Exception):
            self._store.set(f"word/{self._own.rank}", word)
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._store_failed:
            if all(self._words.get(r, "").startswith((_ENDED, _LEFT)) for r in self._others):
                break
            time.sleep(0.1)
        self._stop.set()
        self._beating.join(5.0)  # the interpreter must not end while it is in the store

    def _beat(self) -> None:
        count = 0
        while not self._stop.is_set():
            try:
                count += 1
                self._store.set(f"word/{self._own.rank}", self._last_word or str(count))
                self._listen()
            except Exception:
                self._store_failed = True
                return
            self._stop.wait(BEAT_SECONDS)

    def _listen(self) -> None:
        new = [r for r in self._others if r not in self._places]
        for r in [r for r in new if self._store.check([f"word/{r}"])]:
            self._places[r] = Place(*json.loads(self._store.get(f"place/{r}")))
        known = sorted(self._places)
        words = self._store.multi_get([f"word/{r}" for r in known]) if known else []
        now = time.monotonic()
        for r, word in zip(known, words, strict=True):
            if word.decode() != self._words.get(r):
                self._words[r], self._heard[r] = word.decode(), now
        self._round = now

    def _judge(self) -> None:
        before = time.monotonic()
        while not self._done:
            time.sleep(0.2)
            now = time.monotonic()
            if now - before > PAUSE_SECONDS:
                self._round += now - before
                self._heard = {r: heard + now - before for r, heard in self._heard.items()}
            before = now
            if self.lost is None and self._last_word is None:
                self._look(now)
                if self.lost is not None:
                    self._last_word = _LEFT
                    self._end_at = now + GRACE_SECONDS, PeerLost.exit_code
            if self._end_at is not None and now > self._end_at[0]:
                self._end_now(self._end_at[1])

    def _look(self, now: float) -> None:
        patience = BROKEN_SECONDS if self._broken else LOST_SECONDS
        for r, word in list(self._words.items()):
            if word.startswith(_ENDED):
                self._lose(r, f"ended: {word.removeprefix(_ENDED)}", told=True)
                return
        if self._store_failed or now - self._round > patience:
            why = "is gone" if self._store_failed else f"has not answered for {now - self._round:.0f} s"
            self._lose(0, f"{why}: it was killed, or its node or the network to it failed")
            return
        for r in self._others:
            silent = now - self._heard[r]
            if silent > patience and self._words.get(r) != _LEFT:
                never = r not in self._places
                text = f"never came, in {JOIN_SECONDS:.0f} s" if never else "has not been heard of"
                text += "" if never else f" for {silent:.0f} s"
                self._lose(r, f"{text}: it was killed, or its node or the network to it failed")
                return

    def _lose(self, rank: int, what: str, told: bool = False) -> None:
        place = self._places.get(rank)
        who = "torchrun on this node" if rank == self._own.rank else place or f"rank {rank}"
        problem = Problem(f"{who} {what}", fix="" if told else self._resume_command())
        lost = PeerLost(problem)
        here = [p for p in list(self._places.values()) if p.node == self._own.node and p.rank != rank]
        first = all(self._own.local_rank < p.local_rank for p in here)
        if first and not (told and place is not None and place.node == self._own.node):
            # at once: torchrun may be about to end this process, too
            print(f"error: {lost.render()}", file=sys.stderr, flush=True)
        lost.told = True
        self.lost = lost

    def _end_now(self, code: int) -> None:
        """The main thread is stuck: in a collective, or in taking down what is left of the process group."""
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _is_of_a_collective(error: BaseException) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))
