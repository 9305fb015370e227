"""Counters of a loader, and the immutable snapshot that users see.

`Counters` is written on the consumer's thread only; it belongs to the loader and outlives the engines
(pools of workers) that come and go under it. `LoaderStatistics` is a snapshot, never a handle.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Batches that `statistics()` names as late.
_LATE = 10


@dataclass(frozen=True)
class WorkerStatistics:
    """What one worker did since it started.

    Attributes:
        id: position of the worker, 0 … num_workers-1.
        pid: process id.
        restarts: how often its process died and another one took its place.
        batches: answers it gave (batches and errors).
        work_seconds: wall time between receiving a task and answering it, in seconds, summed.
        idle_seconds: wall time between an answer and the start of the next task, in seconds, summed.
    """

    id: int
    pid: int
    restarts: int
    batches: int
    work_seconds: float
    idle_seconds: float


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


@dataclass(frozen=True)
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


@dataclass(frozen=True)
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
        blocks_in_use: blocks of shared memory that are granted, filled or looked at now.
        blocks_free: blocks that are free now.
        blocks_grown: blocks made since the loader was made. A number that keeps growing means that
            batches are being kept, or that their sizes keep growing.
        arena_bytes: bytes of shared memory behind the blocks that are not free and cold.
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


@dataclass
class StagingCounters:
    """The mutable side of `StagingStatistics`."""

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

    def snapshot(self, device: str) -> StagingStatistics:
        return StagingStatistics(device=device, **vars(self))


@dataclass
class WorkerCounters:
    """The mutable side of `WorkerStatistics`; times in nanoseconds of the monotonic clock."""

    id: int
    pid: int
    restarts: int = 0
    batches: int = 0
    work_ns: int = 0
    idle_ns: int = 0
    last_finished_ns: int = 0

    def answered(self, started_ns: int, finished_ns: int) -> None:
        self.batches += 1
        self.work_ns += finished_ns - started_ns
        if self.last_finished_ns:
            self.idle_ns += started_ns - self.last_finished_ns
        self.last_finished_ns = finished_ns

    def replaced(self, pid: int) -> None:
        """Another process has its number from here on."""
        self.pid = pid
        self.restarts += 1
        self.last_finished_ns = 0

    def snapshot(self) -> WorkerStatistics:
        return WorkerStatistics(
            self.id, self.pid, self.restarts, self.batches, self.work_ns / 1e9, self.idle_ns / 1e9
        )


@dataclass
class Counters:
    """The mutable side of `LoaderStatistics`."""

    epochs: int = 0
    batches: int = 0
    bytes: int = 0
    wait_ns: int = 0
    blocks_grown: int = 0
    stale_answers: int = 0
    rejected_frames: int = 0
    head_of_line_ns: int = 0
    window: int = 0
    late: dict[tuple[int, int], int] = field(default_factory=dict)  # (epoch, batch) → nanoseconds
    workers: list[WorkerCounters] = field(default_factory=list)

    def waited(self, nanoseconds: int, epoch: int, batch: int, behind: int) -> None:
        """`next()` waited for a batch while `behind` others were ready."""
        self.wait_ns += nanoseconds
        if behind:
            self.head_of_line_ns += nanoseconds
            self.late[epoch, batch] = self.late.get((epoch, batch), 0) + nanoseconds
            if len(self.late) > 2 * _LATE:
                self.late = dict(self._latest())

    def _latest(self) -> list[tuple[tuple[int, int], int]]:
        return sorted(self.late.items(), key=lambda entry: -entry[1])[:_LATE]

    def late_batches(self) -> tuple[LateBatch, ...]:
        return tuple(LateBatch(epoch, batch, ns / 1e9) for (epoch, batch), ns in self._latest())
