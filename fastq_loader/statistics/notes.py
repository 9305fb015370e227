"""What has happened in an epoch and is not counted yet.

Whoever runs a batch's way through the consumer puts down what happens in a call, with its times, and the call
is noted when it ends: one append to a list. Some milliseconds later `next()` counts what was noted, many
batches in one go. Between two batches none of
the code that counts is in a CPU's cache, and it would take more than twice as long. Whoever reads the
counters gets them through here, with all notes counted.

Runs in the consumer: notes come on the thread that calls `next()`, readers on any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from fastq_loader.statistics.epoch import Arrival, EpochCounters, Observer

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
        if not (self.notes and self._counting.acquire(blocking=False)):
            return
        notes, done = self.notes, 0
        try:
            for note in notes[:]:
                done += 1
                note[0](*note[1:])  # a star in the target would take twice as long
        finally:  # an interrupt may come
            del notes[:done]
            self._counting.release()


class Notes:
    """The notes of one epoch: one for each call of `next()`, which is made when the call ends.

    Args:
        counters: where they are counted.
        among: those of the loader.

    Attributes:
        epoch: its number.
        drew, answers: of the call under way, see `EpochCounters.inside`.
        others: what else has happened in it: (method, *arguments), with one of the methods below.
        sent, waited, used_device, loaded: see `EpochCounters`.
        count: see `NoteList.count`.
        thread: gives the id of the calling thread; 0 where nobody wants to know it.
        first_batches: see `EpochCounters`.
    """

    def __init__(self, counters: EpochCounters, among: NoteList | None = None) -> None:
        self.epoch = counters.epoch
        self.first_batches = counters.first_batches
        self.thread: Callable[[], int] = int
        self._counters = counters
        self._among = among or NoteList()
        self._note, self.count = self._among.notes.append, self._among.count
        self.sent, self.waited = counters.sent, counters.waited
        self.used_device, self.loaded = counters.used_device, counters.loaded
        self._inside, self._called = counters.inside, counters.called
        self.drew: tuple[int, int, Sequence[int]] | None = None
        self.answers: list[Arrival] = []
        self.others: list[tuple[Any, ...]] = []
        self._entered = self._thread = 0  # the call under way: when and by whom; 0: there is none

    def entered(self, now: int) -> None:
        """`next()` was called."""
        if self._entered:  # an interrupt cut the call before short
            self.flush()
        self._entered, self._thread = now, self.thread()

    def left(self, now: int, answer: Answer | None, seq: int | None, error: BaseException | None) -> bool:
        """The call is about to return a batch, or to raise an error; see `EpochCounters.left`. Returns
        whether it is time to count: for an error always, which would keep all that its frames refer to."""
        answers, others = self.answers or (), self.others or ()  # an empty list is filled in the next call
        inside = self._entered, self._thread, self.drew, answers, others
        self._entered, self.drew = 0, None
        if answers:
            self.answers = []
        if others:
            self.others = []
        self._note((self._called, inside, now, answer, seq, error))
        if now < self._among.count_at and error is None:
            return False
        self._among.count_at = now + _EVERY
        return True

    def flush(self) -> None:
        """Note by itself what has happened since the last call ended: the call under way is cut short or is
        to be counted in parts, or answers came outside of calls."""
        inside = self._entered, self._thread, self.drew, self.answers, self.others
        self._entered, self.drew, self.answers, self.others = 0, None, [], []
        self._note((self._inside, *inside))

    def happened(self, method: Callable[..., None], *arguments: Any) -> None:
        """Note what does not happen for every batch, after all before it. `method`: of `EpochCounters`."""
        if self._entered or self.drew or self.answers or self.others:
            self.flush()
        self._note((method, self._counters, *arguments))

    def of_pool(self, pid_of: Callable[[int], int]) -> None:
        """The epoch's batches come from this pool; see `EpochCounters.pid_of`."""
        self._counters.pid_of = pid_of

    def counted(self) -> EpochCounters:
        """The counters, with all that was noted; see `NoteList.count`."""
        self._among.count()
        return self._counters

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of everything that happens from now on; None ends that."""
        self.counted().observer = observer
        self.thread = int if observer is None else observer.thread
