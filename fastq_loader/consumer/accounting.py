"""The time of one pool's calls: what happens in a call, for the counters of the epoch.

Runs in the consumer, on the thread that calls `next()`. A call is put down as one record when it ends; what
the times come to is found in `statistics.epoch`, many calls at once.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic_ns, process_time_ns
from typing import Any

from fastq_loader.ipc.messages import Answer, decode_index
from fastq_loader.scheduling.events import Wait
from fastq_loader.scheduling.scheduler import Scheduler
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.notes import Notes


class Accounting:
    """Where the time of one pool of workers goes.

    Args:
        counters: the loader's.
        scheduler: knows the batches.

    Attributes:
        notes: where the time of the epoch goes.
        late: the index of a batch that held up others, until it is handed out.
    """

    def __init__(self, counters: Counters, scheduler: Scheduler) -> None:
        self.notes = Notes(EpochCounters(0, 0))
        self._counters = counters
        self._scheduler = scheduler
        self.late: Any = None

    def begin_epoch(self, notes: Notes, pid_of: Callable[[int], int]) -> None:
        """An epoch begins, and what is left of the one before is dropped.

        Args:
            notes: where its time goes.
            pid_of: gives the process id of a worker.
        """
        self.drop()
        self.notes = notes
        notes.of_pool(pid_of)

    def waited(self, wait: Wait, began: int) -> None:
        """`next()` has waited, since `began`."""
        ended = monotonic_ns()
        self._counters.wait_seconds += (ended - began) / 1e9
        cause = "workers"
        if wait.behind and (wait.blocked or wait.behind >= self._scheduler.window.least):
            cause = "head_of_line"
            self._counters.held_up(self.notes.epoch, wait.seq, ended - began)
            self.late = self._scheduler.index_of(wait.seq)
        elif wait.blocked:
            cause = "memory"
        self.notes.others.append((self.notes.waited, cause, began, ended))

    def used_device(self, began: int) -> None:
        """Something was done for the way to the device, since `began`."""
        self.notes.others.append((self.notes.used_device, began, monotonic_ns()))

    def sent_again(self, seq: int) -> None:
        """The task of a batch was sent again."""
        self.notes.others.append((self.notes.sent, seq, monotonic_ns()))

    def replaced(self, worker: int, report: str) -> None:
        """Another process does the work of a worker. `report`: how that one ended."""
        self.notes.happened(EpochCounters.replaced, worker, report, monotonic_ns())

    def came_late(self, answer: Answer) -> None:
        """The call hands out the batch of this answer, and one has held up others."""
        late, self.late = decode_index(self.late), None
        self._counters.came_late(self.notes.epoch, answer, late)

    def ended(self) -> None:
        """The call has found that there is no further batch."""
        self.notes.happened(EpochCounters.ended, monotonic_ns(), process_time_ns())

    def drop(self) -> None:
        """What was not handed out in the epoch never will be."""
        self.notes.happened(EpochCounters.dropped, monotonic_ns())
