"""The counters of a loader.

`Counters` belongs to the loader and outlives the pools of workers that come and go under it. It counts in
the fields of the snapshots, which are frozen. Written on the thread that calls `next()`, but for what is
counted with an epoch (see `notes`), and by a `Source`.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, Protocol

from fastq_loader.statistics.epoch import EpochCounters, Observer, summed
from fastq_loader.statistics.notes import NoteList, Notes
from fastq_loader.statistics.snapshots import (
    LateBatch,
    LoaderStatistics,
    StagingStatistics,
    values_of,
)
from fastq_loader.statistics.workers import WorkerCounters

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer


#: Batches that `statistics()` names as late.
_LATE = 10
#: Epochs that are kept one by one; their sums go on in what is kept of the older ones.
_EPOCHS = 100


class _Counting:
    """Lets a class count in the fields of a frozen one."""

    __setattr__, __delattr__ = object.__setattr__, object.__delattr__


class Source(Protocol):
    """Knows what is counted elsewhere: a pool of workers on other machines."""

    def count(self) -> int:
        """Count what is known of the workers, on any thread; the bytes that they sent."""

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """The process id there and the machine of the worker that a process here stands for, 0 and "" if
        there is none yet; None: it is none of these."""


class StagingCounters(_Counting, StagingStatistics):
    """Counts for the way to a device.

    Attributes:
        observer: is told of every copy, too; None: nobody is.
    """

    observer: Observer | None = None

    def copied(self, nbytes: int, began: float, ended: float) -> None:
        """A copy is known to have run, from when to when, in seconds."""
        if self.observer is not None:
            self.observer.copied(nbytes, int(began * 1e9), int(ended * 1e9))

    def snapshot(self) -> StagingStatistics:
        """What was counted so far."""
        return StagingStatistics(**values_of(self))


class Counters(_Counting, LoaderStatistics):
    """Counts for a loader. What is said of epochs, late batches, restarts, other machines and blocks is found
    when a snapshot is taken.

    Attributes:
        sources: live pools that count elsewhere, too.
        observer: is told of everything that happens in epochs that begin from now on, or None.
    """

    workers: tuple[WorkerCounters, ...]  # type: ignore[assignment]  # of which a snapshot has snapshots
    staging: StagingCounters | None

    def __init__(self) -> None:
        super().__init__()
        self._notes: deque[Notes] = deque()
        self._among = NoteList()
        self.observer: Observer | None = None
        self.sources: set[Source] = set()
        self._older = EpochCounters(0, 0)  # the sum of those before
        self._late: dict[tuple[int, int], LateBatch] = {}
        self._look_at_memory_from = 0  # on the monotonic clock, in nanoseconds

    @property
    def history(self) -> list[EpochCounters]:
        """The counters of the last hundred epochs, the newest last."""
        return [notes.counted() for notes in list(self._notes)]

    @property
    def batch_bytes(self) -> float:
        """What a batch took of the shared memory, on average."""
        return self.bytes / max(1, self.batches)

    def begin_epoch(self, now: int, cpu: int) -> Notes:
        """`iter()` was called: the notes of a new epoch. See `EpochCounters` for `now` and `cpu`."""
        notes = Notes(EpochCounters(self.epochs, now, cpu), self._among)
        notes.observe(self.observer)
        if self.observer is not None:
            self.observer.began(self.epochs, now)
        self.epochs += 1
        self._notes.append(notes)
        if len(self._notes) > _EPOCHS:
            older = self._notes.popleft()
            older.observe(None)  # `observe` does not reach it any more
            self._older.include(older.counted())
        return notes

    def stage(self, staging: StagingCounters | None) -> None:
        """Batches go to a device from now on, or not."""
        self.staging = staging
        self.observe(self.observer)

    def observe(self, observer: Observer | None) -> None:
        """Tell an observer of everything, from now on; None ends that."""
        self.observer = observer
        for notes in self._notes:
            notes.observe(observer)
        if self.staging is not None:
            self.staging.observer = observer

    def ended(self, source: Source) -> None:
        """A pool has ended: what it says now is the last."""
        if source in self.sources:
            self.wire_bytes += source.count()
            self.sources.discard(source)

    def far_worker(self, pid: int) -> tuple[int, str] | None:
        """See `Source`."""
        return next(filter(None, (source.far_worker(pid) for source in list(self.sources))), None)

    def held_up(self, epoch: int, batch: int, nanoseconds: int) -> None:
        """A batch held up others, which were ready, for so long."""
        late = self._late.get((epoch, batch), LateBatch(epoch, batch, 0.0))
        self._late[epoch, batch] = replace(late, seconds=late.seconds + nanoseconds / 1e9)
        if len(self._late) > 2 * _LATE:
            self._late = {(late.epoch, late.batch): late for late in self._worst()}

    def came_late(self, epoch: int, answer: Answer, index: Any) -> None:
        """The answer for a batch that held up others, and the index of the batch."""
        late = self._late.get((epoch, answer.seq))
        if late is None:
            return
        sample = None
        if answer.slowest and type(index) is list and answer.slowest_at < len(index):
            sample = index[answer.slowest_at]
        self._late[epoch, answer.seq] = replace(
            late,
            load_seconds=(answer.finished - answer.started) / 1e9,
            sample=sample,
            sample_seconds=answer.slowest / 1e9,
        )

    def _worst(self) -> list[LateBatch]:
        return sorted(self._late.values(), key=lambda late: -late.seconds)[:_LATE]

    def _look_at_memory(self) -> None:
        """Of the workers. It takes up to a hundredth of the time of who asks for snapshots all the time."""
        began = monotonic_ns()
        if began >= self._look_at_memory_from:
            for worker in self.workers:
                worker.look_at_memory()
            self._look_at_memory_from = began + 100 * (monotonic_ns() - began)

    def snapshot(self, **now: Any) -> LoaderStatistics:
        """What was counted so far, and `now`: fields that others know."""
        history = self.history
        self._look_at_memory()
        wire_bytes = sum((source.count() for source in list(self.sources)), self.wire_bytes)
        found = {
            "total": summed([self._older, *history]),
            "per_epoch": tuple(epoch.snapshot() for epoch in history),
            "late_batches": tuple(self._worst()),
            "worker_restarts": self.worker_restarts,
            "workers": tuple(worker.snapshot() for worker in self.workers),
            "wire_bytes": wire_bytes,
            "staging": None if self.staging is None else self.staging.snapshot(),
        }
        return LoaderStatistics(**values_of(self) | now | found)
