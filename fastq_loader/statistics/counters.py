"""The counters of a loader, and the records of its calls that they are folded from.

`Counters` belongs to the loader and outlives the pools of workers that come and go under it. It counts in
the fields of the snapshots, which are frozen. Records are made on the threads that call `next()`, and folded
there every some milliseconds, or by whoever asks, on any thread. Workers on other machines are counted by a
`Source`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from fastq_loader.statistics.epoch import EpochCounters, summed
from fastq_loader.statistics.records import CLOSE, COPY, CUT, DROP, NEXT, PART, Record, Step
from fastq_loader.statistics.snapshots import Counting, LoaderStatistics, StagingStatistics, values_of
from fastq_loader.statistics.workers import WorkerCounters

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer

#: Epochs that are kept one by one; their sums go on in what is kept of the older ones.
_EPOCHS = 100
#: Nanoseconds between two calls that fold.
_EVERY = 10_000_000


class Source(Protocol):
    """Knows what is counted elsewhere: a pool of workers on other machines."""

    def count(self) -> int:
        """Count what is known of the workers, on any thread; the bytes that they sent."""

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """The process id there and the machine of the worker that a process here stands for, 0 and "" if
        there is none yet; None: it is none of these."""


class StagingCounters(Counting, StagingStatistics):
    """Counts for the way to a device.

    Attributes:
        records: where each copy leaves one; without a loader none are kept.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.records: deque[Record] | list[Record] = deque(maxlen=0)

    def copied(self, nbytes: int, began: float, ended: float) -> None:
        """A copy is known to have run, from when to when, in seconds."""
        self.records.append((COPY, None, int(began * 1e9), int(ended * 1e9), 0, (), nbytes))

    def snapshot(self) -> StagingStatistics:
        """The counts so far."""
        return StagingStatistics(**values_of(self))


class EpochLog:
    """Makes the records of one epoch's calls.

    Args:
        counters: the loader's.
        epoch: what the records come to.
        now: when `iter()` was called, which is the call under way.

    Attributes:
        epoch: its number.
        steps: of the call under way; see `records`.
        first_batches: worker → of its first 8 batches, a digest and the bytes that it was made of; only of an
            iterable dataset.
        drawn_from: names of generators of the user's own that batches drew from in workers, where it makes a
            difference which of them loads a batch.
    """

    def __init__(self, counters: Counters, epoch: EpochCounters, now: int) -> None:
        self.epoch = epoch.epoch
        self.steps: list[Step] = []
        self.first_batches: dict[int, list[tuple[bytes, int]]] = {}
        self.drawn_from: set[str] = set()
        self._counters, self._found = counters, epoch
        self._record = counters.records.append
        self._entered, self._thread = now, counters.identify()  # the call under way; 0: there is none
        self._left = now

    def enter(self, now: int) -> None:
        """`next()` was called."""
        if self._entered:
            self.leave(CUT, now)
        self._entered, self._thread = now, self._counters.identify()

    def give(
        self, now: int, answer: Answer | None, seq: int | None, error: BaseException | type | None
    ) -> None:
        """`next()` is about to return a batch, or to raise an error.

        Args:
            now: when.
            answer: of the worker that loaded it, if there is one.
            seq: the number of the batch, if the error has the place of one.
            error: what is raised. The records are folded at once: its frames hold all that they refer to.
        """
        steps = self.steps or ()  # an empty list is filled in the next call
        if steps:
            self.steps = []
        record = NEXT, self.epoch, self._entered, now, self._thread, steps, answer, seq, error
        self._entered, self._left = 0, now  # before an interrupt could let the call be recorded twice
        self._record(record)
        counters = self._counters
        if now >= counters.fold_at or error is not None:
            counters.fold_at = now + _EVERY
            counters.fold()

    def leave(self, kind: str, now: int, *more: Any) -> None:
        """A call has ended otherwise, or something happened outside of calls: a record of this kind."""
        began = self._left if kind == CLOSE else self._entered
        record = kind, self.epoch, began, now, self._thread, self.steps, *more
        self._entered, self.steps = 0, []
        self._record(record)
        if kind != PART and kind != DROP:
            self._left = now
        if kind != PART and kind != CUT:
            self._counters.fold()

    def counted(self) -> EpochCounters:
        """Fold the records made so far."""
        self._counters.fold()
        return self._found


class Counters(Counting, LoaderStatistics):
    """Counts for a loader. What is known of epochs, waits, late batches, other machines and blocks is found
    when a snapshot is taken.

    Attributes:
        records: those that are not folded yet, of all epochs, in the order in which the calls ended.
        fold_at: when a call folds them again, on the monotonic clock.
        identify: gives the id of the calling thread for records, or 0.
        traced: a trace is written.
        sources: live pools that count elsewhere, too.
    """

    workers: tuple[WorkerCounters, ...]  # of which a snapshot has snapshots
    staging: StagingCounters | None

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.fold_at = 0
        self._folding = threading.Lock()
        self._epochs: dict[int, EpochCounters] = {}
        self._older = EpochCounters(0, 0)  # the sum of those before
        self.follow()
        self.sources: set[Source] = set()
        self._look_at_memory_from = 0  # on the monotonic clock, in nanoseconds

    @property
    def history(self) -> list[EpochCounters]:
        """The counters of the last hundred epochs, the newest last."""
        self.fold()
        return list(self._epochs.values())

    @property
    def batch_bytes(self) -> float:
        """Bytes of shared memory of a batch, on average."""
        return self.bytes / max(1, self.batches)

    def begin_epoch(self, now: int, cpu: int) -> EpochLog:
        """`iter()` was called: the log of a new epoch. See `EpochCounters` for `now` and `cpu`."""
        epoch = self._epochs[self.epochs] = EpochCounters(self.epochs, now, cpu)
        self.epochs += 1
        return EpochLog(self, epoch, now)

    def fold(self) -> None:
        """Count all records. What another thread is counting just now, or this one where the handler of a
        signal asks, is left to it."""
        if not (self.records and self._folding.acquire(blocking=False)):
            return
        records, epochs, followers, done = self.records, self._epochs, self._followers, 0
        try:
            for record in records[:]:
                done += 1
                if record[1] in epochs:  # else it is a copy's, or of an epoch of long ago
                    epochs[record[1]].fold(record)
                for follow in followers:
                    follow(record)
            while len(epochs) > _EPOCHS:
                self._older.include(epochs.pop(next(iter(epochs))))
        finally:  # an interrupt may come
            del records[:done]
            self._folding.release()

    def follow(self, *followers: Callable[[Record], None], identify: Callable[[], int] = int) -> None:
        """Fold the records from now on with these, too, which want to know threads by this."""
        self.fold()
        self._followers, self.traced, self.identify = followers, bool(followers), identify

    def stage(self, staging: StagingCounters | None) -> None:
        """Batches go to a device from now on, or not."""
        self.staging = staging
        if staging is not None:
            staging.records = self.records

    def ended(self, source: Source) -> None:
        """A pool has ended: what it says now is the last."""
        if source in self.sources:
            self.wire_bytes += source.count()
            self.sources.discard(source)

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """See `Source`."""
        return next(filter(None, (source.far_worker(pid) for source in list(self.sources))), None)

    def _look_at_memory(self) -> None:
        """Of the workers. It takes up to a hundredth of the time of who asks for snapshots all the time."""
        began = monotonic_ns()
        if began >= self._look_at_memory_from:
            for worker in self.workers:
                worker.look_at_memory()
            self._look_at_memory_from = began + 100 * (monotonic_ns() - began)

    def snapshot(self, **now: Any) -> LoaderStatistics:
        """The counts so far, and `now`: fields that others know."""
        history = self.history
        self._look_at_memory()
        wire_bytes = sum((source.count() for source in list(self.sources)), self.wire_bytes)
        total = summed([self._older, *history])
        found = {
            "total": replace(total.snapshot(), epoch=None, ready=()),
            "per_epoch": tuple(epoch.snapshot() for epoch in history),
            "wait_seconds": total.waited / 1e9,
            "late_batches": tuple(total.worst()),
            "workers": tuple(worker.snapshot() for worker in self.workers),
            "wire_bytes": wire_bytes,
            "staging": None if self.staging is None else self.staging.snapshot(),
        }
        return LoaderStatistics(**values_of(self) | now | found)
