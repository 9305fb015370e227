"""What has happened in an epoch and is not counted yet.

Whoever runs a batch's way through the consumer notes what happens, with its times: an append to a list.
Some milliseconds later `next()` counts what was noted, many batches in one go. Between two batches none of
the code that counts is in a CPU's cache, and it would take more than twice as long. Whoever reads the
counters gets them through here, with all notes counted.

Runs in the consumer: notes come on the thread that calls `next()`, readers on any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastq_loader.statistics.epoch import EpochCounters, Observer

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer

# What is noted: one of these, and its arguments.
ENTERED = EpochCounters.entered
DREW = EpochCounters.drew
SENT = EpochCounters.sent
WAITED = EpochCounters.waited
USED_DEVICE = EpochCounters.used_device
ANSWERED = EpochCounters.answered
LOADED = EpochCounters.loaded
LEFT = EpochCounters.left

#: Nanoseconds between two calls that count.
_EVERY = 10_000_000


class Notes:
    """The notes of one epoch.

    Args:
        counters: where they are counted.

    Attributes:
        epoch: its number.
        note: takes (what, *arguments).
        thread: gives the id of the calling thread for `ENTERED`; 0 where nobody wants to know it.
        first_batches: see `EpochCounters`.
    """

    def __init__(self, counters: EpochCounters) -> None:
        self.epoch = counters.epoch
        self.first_batches = counters.first_batches
        self.thread: Callable[[], int] = int
        self._counters = counters
        self._noted: list[tuple[Any, ...]] = []
        self.note = self._noted.append
        self._next = 0  # when a call counts again
        self._counting = threading.Lock()

    def left(self, now: int, answer: Answer | None, seq: int | None, error: BaseException | None) -> None:
        """A call is about to return a batch, or to raise an error; see `EpochCounters.left`."""
        self.note((LEFT, now, answer, seq, error))
        if now >= self._next or error is not None:  # which would keep all that its frames refer to
            self._next = now + _EVERY
            self.counted()

    def at_once(self, *what: Any) -> None:
        """Count something that does not happen for every batch, and all before it."""
        self.note(what)
        self.counted()

    def counted(self) -> EpochCounters:
        """The counters, with all that was noted. What another thread is counting just now, or this one where
        the handler of a signal asks, is in them soon."""
        if self._noted and self._counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._counting.release()
        return self._counters

    def _count(self) -> None:
        noted, counters, done = self._noted, self._counters, 0
        try:
            for what, *arguments in noted[:]:
                done += 1
                what(counters, *arguments)
        finally:  # an interrupt may come
            del noted[:done]

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of everything that happens from now on; None ends that."""
        self.counted().observer = observer
        self.thread = int if observer is None else observer.thread
