"""The counters of one worker.

Runs in the consumer. Answers are counted here while an epoch's records are folded, see `epoch`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastq_loader.statistics.snapshots import MutableFields, WorkerStatistics, values_of
from fastq_loader.system.pages import shared_and_private

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer


class WorkerCounters(MutableFields, WorkerStatistics):
    """Counters of one worker, in the fields of a snapshot.

    Attributes:
        far: process id and machine of the remote worker for which this one stands, if any.
        cpu_marks: (CPU time plus time waiting for a CPU, work time) in seconds, at the first and at the last
            measurement. The CPU time of start-up lies before the first.
    """

    def __init__(self, id: int, pid: int) -> None:
        super().__init__(id, pid)
        self.far: tuple[int, str | None] | None = None
        self.cpu_marks: tuple[tuple[float, float], ...] = ()
        self._process = self._finished = 0  # process and monotonic time of its last answer, or 0

    def answered(self, answer: Answer, sent: int = 0, process: int = 0) -> None:
        """Count an answer to a task.

        Args:
            answer: with its times, on the monotonic clock.
            sent: when the task was sent, if the worker has already answered one in this epoch; else 0.
            process: the process that answered; a new one has no idle time yet.
        """
        if process != self._process:
            self._process, self._finished, self.cpu_marks = process, 0, ()
        started, finished, collated = answer.started, answer.finished, answer.collated
        self.batches += 1
        self.work_seconds += (finished - started) / 1e9
        if collated:  # else nothing was loaded
            self.fetch_seconds += (answer.fetched - started) / 1e9
            self.collate_seconds += (collated - answer.fetched) / 1e9
            self.packing_seconds += (finished - collated) / 1e9
            self.new_memory_seconds += answer.new_memory / 1e9
        if answer.cpu:
            self.cpu_seconds = answer.cpu / 1e9
            mark = (answer.cpu + answer.cpu_wait) / 1e9, self.work_seconds
            self.cpu_marks = (*self.cpu_marks[:1], mark)
        before, self._finished = self._finished, finished
        if before:
            blocked = (sent if sent < started else started) - before if sent > before else 0
            self.blocked_seconds += blocked / 1e9
            self.idle_seconds += (started - before - blocked) / 1e9

    def replaced(self, pid: int) -> None:
        """Count that another process takes over."""
        self.pid = pid
        self.restarts += 1
        self.shared_bytes = self.private_bytes = 0

    def look_at_memory(self) -> None:
        """Read the memory of its process from the kernel, if that runs on this machine."""
        if self.far is None and (seen := shared_and_private(self.pid)):
            self.shared_bytes, self.private_bytes = seen

    def snapshot(self) -> WorkerStatistics:
        """The counts so far."""
        pid, node = self.far or (self.pid, None)
        return WorkerStatistics(**values_of(self) | {"pid": pid, "node": node})
