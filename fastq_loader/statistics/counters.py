"""The counters of a loader, and the records of its calls from which they are computed.

`Counters` belongs to the loader and outlives its pools of workers. It counts in the fields of the snapshots,
which themselves are frozen. Records are created on the threads that call `next()`, and folded there every
10 ms, or whenever statistics are requested, on any thread. Workers on other machines are counted by a
`StatisticsSource`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from fastq_loader.statistics.epoch import EpochCounters, summed
from fastq_loader.statistics.records import CLOSE, COPY, CUT, DROP, END, ITER, NEXT, PART, Record, Step
from fastq_loader.statistics.snapshots import LoaderStatistics, MutableFields, StagingStatistics, values_of
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.system.unpatched import time

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer

#: Epochs that are stored one by one; older ones are added up.
_EPOCHS = 100
#: Nanoseconds between two calls that fold records.
_EVERY = 10_000_000


class StatisticsSource(Protocol):
    """A pool of workers on other machines, which counts for itself."""

    def count(self) -> int:
        """Update the counters of its workers, on any thread; returns the bytes that they sent."""

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """Process id and machine of the remote worker for which the local process `pid` stands, 0 and ""
        before it has started; None if `pid` is not of this pool."""


class StagingCounters(MutableFields, StagingStatistics):
    """Counts copies to a device.

    Attributes:
        records: receives a record of each copy; without a loader they are discarded.
    """

    def __init__(self, device: str) -> None:
        super().__init__(device)
        self.records: deque[Record] | list[Record] = deque(maxlen=0)

    def copied(self, nbytes: int, began: float, ended: float) -> None:
        """Record a copy that has run, with its begin and end in seconds."""
        self.records.append((COPY, None, int(began * 1e9), int(ended * 1e9), 0, (), nbytes))

    def snapshot(self) -> StagingStatistics:
        """The counts so far."""
        return StagingStatistics(**values_of(self))


class EpochLog:
    """Creates the records of one epoch's calls.

    Args:
        counters: the loader's.
        epoch: the counters of the epoch, into which the records are folded.
        now: when `iter()` was called, which is the call in progress.

    Attributes:
        epoch: its number.
        steps: of the call in progress; see `records`.
        first_batches: worker → digest and bytes digested of each of its first 8 batches; only of an iterable
            dataset.
        private_generators: names of the generators that the dataset has for itself, if it matters which
            worker loads a batch.
    """

    def __init__(self, counters: Counters, epoch: EpochCounters, now: int) -> None:
        self.epoch = epoch.epoch
        self.steps: list[Step] = []
        self.first_batches: dict[int, list[tuple[bytes, int]]] = {}
        self.private_generators: set[str] = set()
        self._counters, self._found = counters, epoch
        self._record = counters.records.append
        self._entered, self._thread = now, counters.identify()  # the call in progress, or 0
        self._left = now

    def enter(self, now: int) -> None:
        """Note that `next()` was called."""
        if self._entered:
            self.leave(CUT, now)
        self._entered, self._thread = now, self._counters.identify()

    def give(
        self, now: int, answer: Answer | None, seq: int | None, error: BaseException | type | None
    ) -> None:
        """Record that `next()` is about to return a batch, or to raise an error.

        Args:
            now: when.
            answer: of the worker that loaded the batch, if any.
            seq: the number of the batch in whose place the error is raised, if any.
            error: the error. The records are then folded at once: its frames keep alive all they refer to.
        """
        steps, self.steps = self.steps, []
        record = NEXT, self.epoch, self._entered, now, self._thread, steps, answer, seq, error
        self._entered, self._left = 0, now  # first: an interrupt must not record the call twice
        self._record(record)
        counters = self._counters
        if now >= counters.fold_at or error is not None:
            counters.fold_at = now + _EVERY
            counters.fold()

    def leave(self, kind: str, now: int, *more: Any) -> None:
        """Record a call that ended in another way, or an event outside of calls, as this kind."""
        began = self._left if kind == CLOSE else self._entered
        record = kind, self.epoch, began, now, self._thread, self.steps, *more
        self._entered, self.steps = 0, []
        self._record(record)
        if kind != PART and kind != DROP:
            self._left = now
        counters = self._counters
        if kind in (CLOSE, DROP) or (kind in (ITER, END) and (now >= counters.fold_at or counters.traced)):
            counters.fold_at = now + _EVERY
            counters.fold()

    def counted(self) -> EpochCounters:
        """The counters of the epoch, with all records so far folded."""
        self._counters.fold()
        return self._found


class Counters(MutableFields, LoaderStatistics):
    """Counters of a loader. The fields for epochs, waits, late batches, other machines and blocks are filled
    in when a snapshot is taken.

    Attributes:
        records: not folded yet, of all epochs, in the order in which the calls ended.
        fold_at: when a call folds them again, on the monotonic clock.
        identify: returns the id of the calling thread for records, or 0.
        traced: whether a trace is being written.
        sources: live pools of workers on other machines.
    """

    workers: tuple[WorkerCounters, ...]  # a snapshot contains their snapshots
    staging: StagingCounters | None

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Record] = []
        self.fold_at = 0
        self._folding = threading.Lock()
        self._epochs: dict[int, EpochCounters] = {}
        self._older = EpochCounters(0, 0)  # the sum of the earlier epochs
        self.follow()
        self.sources: set[StatisticsSource] = set()
        self._look_at_memory_from = 0  # on the monotonic clock, in nanoseconds

    @property
    def history(self) -> list[EpochCounters]:
        """The counters of the last hundred epochs, the newest last."""
        self.fold()
        return list(self._epochs.values())

    @property
    def batch_bytes(self) -> float:
        """Average bytes of shared memory per batch."""
        return self.bytes / max(1, self.batches)

    def begin_epoch(self, now: int, cpu: int) -> EpochLog:
        """Create the log of a new epoch when `iter()` is called. See `EpochCounters` for `now` and `cpu`."""
        epoch = self._epochs[self.epochs] = EpochCounters(self.epochs, now, cpu)
        self.epochs += 1
        return EpochLog(self, epoch, now)

    def fold(self) -> None:
        """Count all records, unless another thread is counting, or a signal handler interrupted this one in
        it."""
        if not (self.records and self._folding.acquire(blocking=False)):
            return
        records, epochs, followers, done = self.records, self._epochs, self._followers, 0
        try:
            for record in records[:]:
                done += 1
                if record[1] in epochs:  # else of a copy, or of an old epoch
                    epochs[record[1]].fold(record)
                for follow in followers:
                    follow(record)
            while len(epochs) > _EPOCHS:
                self._older.include(epochs.pop(next(iter(epochs))))
        finally:  # an interrupt may come
            del records[:done]
            self._folding.release()

    def follow(self, *followers: Callable[[Record], None], identify: Callable[[], int] = int) -> None:
        """Pass future records to `followers`, too; `identify` returns their thread id."""
        self.fold()
        self._followers, self.traced, self.identify = followers, bool(followers), identify

    def stage(self, staging: StagingCounters | None) -> None:
        """Set the counters of copies to a device; None if batches stay on the host."""
        self.staging = staging
        if staging is not None:
            staging.records = self.records

    def ended(self, source: StatisticsSource) -> None:
        """Include the final counts of a pool that has ended."""
        if source in self.sources:
            self.wire_bytes += source.count()
            self.sources.discard(source)

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """See `StatisticsSource`."""
        return next(filter(None, (source.far_worker(pid) for source in list(self.sources))), None)

    def _look_at_memory(self) -> None:
        """Measure the workers' memory, in at most 1 % of the time of a caller that polls snapshots."""
        began = time.monotonic_ns()
        if began >= self._look_at_memory_from:
            for worker in self.workers:
                worker.look_at_memory()
            self._look_at_memory_from = began + 100 * (time.monotonic_ns() - began)

    def snapshot(self, **now: Any) -> LoaderStatistics:
        """The counts so far, with the fields in `now`, which the caller provides."""
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
