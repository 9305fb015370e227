"""Where workers run: what somebody who starts hosts has to offer, and which stand-in has which place.

Runs in the consumer, at its end of every stand-in's pipe, on a thread of its own, because places come and
stand-ins lose them while the consumer is in a training step. Places are found for as many workers as there
are, before any stand-in is up; a stand-in that waits gets the first that is ready. One that has lost its
place gives it back, and another one is found.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection as Pipe
from typing import Any, Protocol

from fastq_loader.remote.control import Dying, NoPlace, Place, Told, Up, Waiting
from fastq_loader.system import calls
from fastq_loader.system.interrupts import without_signals

#: Takes a place that has been found, or that there is none or none any more.
Found = Callable[[Place | NoPlace], None]


class Placement(Protocol):
    """Starts hosts, and finds places for workers on them, for one pool.

    None of this may wait for long, but for `close`. It is called on several threads, one at a time but for
    `close`, which comes last.
    """

    def start(self, spec: bytes, found: Found) -> None:
        """A pool starts. Hosts are to be started with `host.Host(spec, ...)`, one on each machine; places go
        to `found`."""

    def acquire(self, number: int) -> None:
        """Find a place for one worker, and call `found` with it when its host listens: in here or later, on
        any thread. Until then the worker waits, for a machine that will join perhaps; with a `NoPlace` it
        dies of it, and with the error that this may raise. The place has this number. One that is gone is
        followed by a `NoPlace`.
        """

    def release(self, number: int, why: str) -> None:
        """A place is not needed any more, or of no use. What ran there has ended, or will in a moment.

        Args:
            number: of `acquire`. Each that `found` was called with is given back once, before `close`.
            why: the connection was lost or not to be had, in words; a machine that is suspected should not be
                given out again at once. "" if it was simply not needed any more.
        """

    def death(self, number: int) -> str:
        """What is known of why a place was lost ("node 10.0.0.2 was removed"); "" for nothing. Is asked when
        the host does not answer."""

    def close(self) -> None:
        """All workers have ended: end the hosts; returns when they have. May be called after a `start` that
        failed, or without one."""


@dataclass(eq=False)
class Tie:
    """The consumer's end of a pipe to a stand-in, and what came out of it.

    Attributes:
        pipe: the end.
        place: that the stand-in has, or had last.
        number: of that place, or of one that was not to be had; None once it was given back.
        pid: of its far worker; 0 until it is up.
        why: it said that it would die, and of what.
        waits: it waits for one.
    """

    pipe: Pipe[Any, Any]
    place: Place | None = None
    number: int | None = None
    pid: int = 0
    why: str = ""
    waits: bool = False


class Places:
    """The places of one pool.

    Args:
        placement: finds them.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._lock = threading.RLock()
        self._number = 0  # of the last place that was asked for
        self._asked: set[int] = set()  # numbers that were not given back yet
        self._news: deque[Place | NoPlace] = deque()  # of the placement; any thread adds to it
        self._ready: deque[Place | NoPlace] = deque()  # nobody has them yet
        self._ties: list[Tie] = []
        self._stopped = self._closed = False
        self._waking = threading.Lock()  # no wake-up is written to a descriptor that was closed
        self._wake = -1
        self._thread = threading.Thread(target=self._run, name="fastq_loader: places", daemon=True)

    def start(self, workers: int, spec: bytes) -> None:
        """Find places for as many workers, on hosts that are told this."""
        self._wake = calls.wake_up()
        self._placement.start(spec, self._found)
        for _ in range(workers):
            self._seek()
        with without_signals():  # they are for the main thread, which may keep them out of a start
            self._thread.start()

    def tie(self, pipe: Pipe[Any, Any], told: Told) -> Tie:
        """A stand-in is about to start: tell it what it is to do. It gets a place when it waits for one."""
        tie = Tie(pipe)
        self._tell(tie, told)
        with self._lock:
            self._ties.append(tie)
        self._wake_up()
        return tie

    def read(self, tie: Tie) -> None:
        """Take note of what a stand-in has said by now. May be called on any thread."""
        with self._lock:
            try:
                while not tie.pipe.closed and tie.pipe.poll():
                    self._note(tie, tie.pipe.recv())
            except (EOFError, OSError):  # it has ended
                tie.waits = False
                self._give_up(tie, tie.why)
                self._ties.remove(tie)
                tie.pipe.close()

    def where(self, tie: Tie) -> tuple[Place | None, int]:
        """The place of a stand-in, and the process id of its far worker there, as of now. May be called on
        any thread."""
        with self._lock:
            self.read(tie)
            return tie.place, tie.pid

    def stop(self) -> None:
        """No more places are needed."""
        self._stopped = True

    def close(self) -> None:
        """All stand-ins have ended; returns when the thread has."""
        self._stopped = self._closed = True
        if self._thread.ident is not None:
            self._wake_up()
            self._thread.join()
        for tie in list(self._ties):
            self.read(tie)
        with self._waking:
            wake, self._wake = self._wake, -1
        if wake >= 0:
            os.close(wake)

    def _wake_up(self) -> None:
        with self._waking:
            if self._wake >= 0:
                calls.wake(self._wake)

    # ---- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._closed:
            with self._lock:
                for tie in list(self._ties):
                    self.read(tie)
                self._sort()
                for tie in self._ties:
                    self._serve(tie)
                descriptors = [tie.pipe.fileno() for tie in self._ties]
            if self._wake in calls.readable([self._wake, *descriptors], None):
                os.read(self._wake, 8)

    def _note(self, tie: Tie, said: Waiting | Up | Dying) -> None:
        if isinstance(said, Up):
            tie.pid = said.pid
        elif isinstance(said, Dying):
            tie.why = said.why
        else:
            tie.waits = True
            self._give_up(tie, said.why)

    def _serve(self, tie: Tie) -> None:
        """Give a stand-in that waits a place, if there is one."""
        if tie.waits and self._ready:
            found = self._ready.popleft()
            tie.number, tie.waits = found.number, False
            if isinstance(found, Place):
                tie.place, tie.pid = found, 0
            self._tell(tie, found)

    def _tell(self, tie: Tie, message: Told | Place | NoPlace) -> None:
        with contextlib.suppress(OSError):  # it has ended; `read` finds that, too
            tie.pipe.send(message)

    def _sort(self) -> None:
        """Keep places that are found, until somebody waits for one. Of one that is gone, who has it is told;
        one that nobody has yet is replaced."""
        while self._news:
            found = self._news.popleft()
            had = next((tie for tie in self._ties if tie.number == found.number), None)
            kept = next((one for one in self._ready if one.number == found.number), None)
            if found.number not in self._asked:  # it was given back meanwhile
                continue
            if had is not None:
                self._tell(had, found)
            elif kept is not None and isinstance(found, NoPlace):
                self._ready.remove(kept)
                self._replace(found.number, found.why)
            else:
                self._ready.append(found)

    def _give_up(self, tie: Tie, why: str) -> None:
        """A stand-in does not have its place any more. Another one is found, for it or its successor."""
        number, tie.number = tie.number, None
        if number is not None:
            self._replace(number, why)

    def _replace(self, number: int, why: str) -> None:
        self._asked.discard(number)
        self._placement.release(number, why)
        if self._stopped:
            return
        try:
            self._seek()
        except Exception as error:  # the one that waits for it says so
            self._found(NoPlace(self._number, f"{type(error).__name__}: {error}"))

    def _seek(self) -> None:
        self._number += 1
        self._asked.add(self._number)
        self._placement.acquire(self._number)

    def _found(self, found: Place | NoPlace) -> None:
        """On any thread: a place is ready, or there is none."""
        self._news.append(found)
        self._wake_up()
