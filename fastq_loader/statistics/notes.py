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

#: Nanoseconds between two calls that count.
_EVERY = 10_000_000


class NoteList:
    """The notes of one loader's epochs, in the order in which things happened.

    Attributes:
        notes: each is (method, *arguments).
        count_at: when a call counts again, in nanoseconds of the monotonic clock.
    """

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []
        self.count_at = 0
        self._counting = threading.Lock()

    def count(self) -> None:
        """Count all. What another thread is counting just now, or this one where the handler of a signal
        asks, is left to it."""
        if self.notes and self._counting.acquire(blocking=False):
            try:
                self._count()
            finally:
                self._counting.release()

    def _count(self) -> None:
        notes, done = self.notes, 0
        try:
            for note in notes[:]:
                done += 1
                note[0](*note[1:])  # a star in the target would take twice as long
        finally:  # an interrupt may come
            del notes[:done]


class Notes:
    """The notes of one epoch.

    Args:
        counters: where they are counted.
        among: those of the loader.

    Attributes:
        epoch: its number.
        note: takes (method, *arguments), with one of the methods below.
        entered, drew, sent, waited, used_device, answered, loaded: what is noted; see `EpochCounters`.
        thread: gives the id of the calling thread for `entered`; 0 where nobody wants to know it.
        first_batches: see `EpochCounters`.
    """

    def __init__(self, counters: EpochCounters, among: NoteList | None = None) -> None:
        self.epoch = counters.epoch
        self.first_batches = counters.first_batches
        self.thread: Callable[[], int] = int
        self._counters = counters
        self._among = among or NoteList()
        self.note = self._among.notes.append
        self.entered, self.drew, self.sent = counters.entered, counters.drew, counters.sent
        self.waited, self.used_device = counters.waited, counters.used_device
        self.answered, self.loaded = counters.answered, counters.loaded

    def left(self, now: int, answer: Answer | None, seq: int | None, error: BaseException | None) -> None:
        """A call is about to return a batch, or to raise an error; see `EpochCounters.left`."""
        self.note((self._counters.left, now, answer, seq, error))
        if now >= self._among.count_at or error is not None:  # which would keep all that its frames refer to
            self._among.count_at = now + _EVERY
            self._among.count()

    def at_once(self, method: Callable[..., None], *arguments: Any) -> None:
        """Count what does not happen for every batch, and all before it. `method`: of `EpochCounters`."""
        self.note((method, self._counters, *arguments))
        self._among.count()

    def counted(self) -> EpochCounters:
        """The counters, with all that was noted; see `NoteList.count`."""
        self._among.count()
        return self._counters

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of everything that happens from now on; None ends that."""
        self.counted().observer = observer
        self.thread = int if observer is None else observer.thread
