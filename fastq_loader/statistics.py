"""What a loader counts, and the snapshots of it that users see.

`Counters` is written on the consumer's thread only; it belongs to the loader and outlives the pools of
workers that come and go under it. It counts in the fields of `LoaderStatistics`, which is frozen: what
`statistics()` returns is a copy, which later counting does not change and nobody alters by accident.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # else it would not allow the counters below to count
    from dataclasses import dataclass as frozen
else:
    frozen = dataclass(frozen=True)

#: Batches that `statistics()` names as late.
_LATE = 10


@frozen
class WorkerStatistics:
    """What one worker did since it started.

    Attributes:
        id: its number, 0 … num_workers-1.
        pid: process id.
        restarts: how often its process died and another one took its place.
        batches: answers it gave (batches and errors).
        work_seconds: wall time between receiving a task and answering it, in seconds, summed.
        idle_seconds: wall time between an answer and the start of the next task, in seconds, summed.
    """

    id: int
    pid: int
    restarts: int = 0
    batches: int = 0
    work_seconds: float = 0.0
    idle_seconds: float = 0.0


@dataclass(frozen=True)
class LateBatch:
    """A batch that others, which were ready, had to wait for.

    Attributes:
        epoch, batch: its number.
        seconds: wall time that `next()` waited for it while others were ready.
    """

    epoch: int
    batch: int
    seconds: float


@frozen
class StagingStatistics:
    """What was copied to the device, since the loader was made unless said otherwise.

    Attributes:
        device: which.
        pin: "register" (blocks are page-locked in place), "bounce" (batches are copied to page-locked buffers
            first) or "pageable"; "" before the first epoch.
        pin_reason: why that.
        pinned_bytes: bytes of host memory that are page-locked now.
        populate_seconds: wall time spent on mapping the pages of blocks before they were locked, in seconds.
        register_seconds: wall time spent on locking pages and making page-locked buffers, in seconds.
        copies, copied_bytes: copies to the device, one for each batch with tensors, and their bytes.
        late_copies: batches handed out before they had arrived: the device's stream waits for them.
        copy_wait_seconds: wall time that `next()` waited for a bounce buffer, in seconds.
        block_wait_seconds: wall time that `next()` waited for copies because the device was behind by twice
            `prefetch` batches, whose blocks cannot be written again before, in seconds.
    """

    device: str
    pin: str = ""
    pin_reason: str = ""
    pinned_bytes: int = 0
    populate_seconds: float = 0.0
    register_seconds: float = 0.0
    copies: int = 0
    copied_bytes: int = 0
    late_copies: int = 0
    copy_wait_seconds: float = 0.0
    block_wait_seconds: float = 0.0


@frozen
class LoaderStatistics:
    """A snapshot of what a loader did; all counts since the loader was made unless said otherwise.

    Attributes:
        epochs: iterations started.
        batches: batches handed to the user.
        bytes: bytes of tensors and arrays in those batches as they lay in shared memory (0 with
            num_workers=0, which uses none).
        wait_seconds: wall time that `next()` spent waiting for workers, in seconds; with num_workers=0
            the time spent loading.
        head_of_line_seconds: the part of it in which later batches were ready and the next one was not.
        late_batches: the batches that caused most of that, the worst first, ten at most.
        window: batches that may be under way now; of the live pool, or of the last one.
        worker_restarts: workers that died or hung and were replaced.
        rejected_frames: what came over the sockets and was no answer to any task.
        workers: one entry for each worker of the live pool, or of the last one.
        blocks_in_use: blocks of shared memory that are granted, filled or held by users now.
        blocks_free: blocks that are free now.
        blocks_grown: blocks made since the loader was made. A number that keeps growing means that
            batches are being kept, or that their sizes keep growing.
        arena_bytes: bytes of shared memory behind them; those of free blocks that were trimmed do not count.
        stale_answers: answers that came after their epoch had been abandoned, and were dropped.
        staging: copies to the device; None without one.
    """

    epochs: int = 0
    batches: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    head_of_line_seconds: float = 0.0
    late_batches: tuple[LateBatch, ...] = ()
    window: int = 0
    worker_restarts: int = 0
    rejected_frames: int = 0
    workers: tuple[WorkerStatistics, ...] = ()
    blocks_in_use: int = 0
    blocks_free: int = 0
    blocks_grown: int = 0
    arena_bytes: int = 0
    stale_answers: int = 0
    staging: StagingStatistics | None = None


class _Counting:
    """Lets a class count in the fields of a frozen one."""

    __setattr__, __delattr__ = object.__setattr__, object.__delattr__


class WorkerCounters(_Counting, WorkerStatistics):
    """Counts for one worker."""

    _finished_ns = 0  # when it gave its last answer, on the monotonic clock; 0: it has given none

    def answered(self, started_ns: int, finished_ns: int) -> None:
        """It answered a task; when it had started and finished it, on the monotonic clock."""
        self.batches += 1
        self.work_seconds += (finished_ns - started_ns) / 1e9
        if self._finished_ns:
            self.idle_seconds += (started_ns - self._finished_ns) / 1e9
        self._finished_ns = finished_ns

    def replaced(self, pid: int) -> None:
        """Another process has its number from here on."""
        self.pid = pid
        self.restarts += 1
        self._finished_ns = 0


class StagingCounters(_Counting, StagingStatistics):
    """Counts for the way to a device."""

    def snapshot(self) -> StagingStatistics:
        """What was counted so far."""
        return StagingStatistics(**_values(self))


class Counters(_Counting, LoaderStatistics):
    """Counts for a loader. `late_batches`, `worker_restarts` and what is said of blocks are found when a
    snapshot is taken."""

    workers: tuple[WorkerCounters, ...]

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[tuple[int, int], float] = {}  # (epoch, batch) → seconds

    def waited(self, nanoseconds: int, epoch: int = 0, batch: int = 0, behind: int = 0) -> None:
        """`next()` waited for a batch while `behind` others were ready."""
        seconds = nanoseconds / 1e9
        self.wait_seconds += seconds
        if behind:
            self.head_of_line_seconds += seconds
            self._late[epoch, batch] = self._late.get((epoch, batch), 0.0) + seconds
            if len(self._late) > 2 * _LATE:
                self._late = dict(self._worst())

    def _worst(self) -> list[tuple[tuple[int, int], float]]:
        return sorted(self._late.items(), key=lambda entry: -entry[1])[:_LATE]

    def snapshot(self, **now: Any) -> LoaderStatistics:
        """What was counted so far, and `now`: fields that others know."""
        return LoaderStatistics(
            **_values(self)
            | now
            | {
                "late_batches": tuple(LateBatch(*number, seconds) for number, seconds in self._worst()),
                "worker_restarts": sum(worker.restarts for worker in self.workers),
                "workers": tuple(WorkerStatistics(**_values(worker)) for worker in self.workers),
            }
        )


def _values(counters: LoaderStatistics | WorkerStatistics | StagingStatistics) -> dict[str, Any]:
    return {field.name: getattr(counters, field.name) for field in fields(counters)}
