"""The counters of one worker.

Runs in the consumer. An epoch counts its answers here, see `epoch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastq_loader.statistics.snapshots import WorkerStatistics
from fastq_loader.system.pages import shared_and_private

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer


class WorkerCounters:
    """Counts for one worker, in nanoseconds. See `WorkerStatistics`.

    Attributes:
        pid: of the process here.
        far: process id and machine of the worker that this stands for, if there is one.
        cpu_marks: nanoseconds of CPU time, with those in which it waited for a CPU, and of work, when they
            were known first, and last. What it used to start lies before the first.
        memory: bytes that it shares, and that it has alone, as they were seen last.
    """

    __slots__ = (
        *("_blocked", "_collate", "_cpu", "_fetch", "_finished", "_idle", "_new_memory", "_packing", "_work"),
        *("batches", "cpu_marks", "far", "id", "memory", "pid", "restarts", "wire_bytes"),
    )

    def __init__(self, id: int, pid: int) -> None:
        self.id = id
        self.pid = pid
        self.far: tuple[int, str | None] | None = None
        self.restarts = self.batches = self.wire_bytes = 0
        self.cpu_marks: tuple[tuple[int, int], ...] = ()
        self.memory = 0, 0
        self._finished = 0  # when it gave its last answer, on the monotonic clock; 0: it has given none
        self._work = self._fetch = self._collate = self._packing = self._new_memory = 0
        self._cpu = self._idle = self._blocked = 0

    def answered(self, answer: Answer, sent: int = 0) -> None:
        """It answered a task.

        Args:
            answer: its times, on the monotonic clock.
            sent: when the task was sent, if it has answered another one in this epoch before; else 0.
        """
        started, finished, fetched, collated = answer[4], answer[5], answer[11], answer[12]
        self.batches += 1
        self._work += finished - started
        if collated:  # else nothing was loaded
            self._fetch += fetched - started
            self._collate += collated - fetched
            self._packing += finished - collated
            self._new_memory += answer[13]
        if answer[14]:
            self._cpu = answer.cpu
            self.cpu_marks = (*self.cpu_marks[:1], (answer.cpu + answer.cpu_wait, self._work))
        before, self._finished = self._finished, finished
        if before:
            self._idle += started - before
            if sent > before:
                blocked = (sent if sent < started else started) - before
                self._blocked += blocked
                self._idle -= blocked

    def replaced(self, pid: int) -> None:
        """Another process has its number from here on."""
        self.pid = pid
        self.restarts += 1
        self.cpu_marks = ()
        self.memory = 0, 0
        self._finished = 0

    def look_at_memory(self) -> None:
        """Ask the kernel for the memory of its process, if that is here and runs."""
        if self.far is None:
            self.memory = shared_and_private(self.pid) or self.memory

    def snapshot(self) -> WorkerStatistics:
        """What was counted so far."""
        pid, node = self.far or (self.pid, None)
        return WorkerStatistics(
            id=self.id,
            pid=pid,
            restarts=self.restarts,
            batches=self.batches,
            work_seconds=self._work / 1e9,
            fetch_seconds=self._fetch / 1e9,
            collate_seconds=self._collate / 1e9,
            packing_seconds=self._packing / 1e9,
            new_memory_seconds=self._new_memory / 1e9,
            cpu_seconds=self._cpu / 1e9,
            idle_seconds=self._idle / 1e9,
            blocked_seconds=self._blocked / 1e9,
            node=node,
            wire_bytes=self.wire_bytes,
            shared_bytes=self.memory[0],
            private_bytes=self.memory[1],
        )
