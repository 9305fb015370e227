"""The tasks that a worker has received and not begun.

Runs in a worker, on its main thread, or in a proxy. Assigned tasks all belong to the worker, which takes them
in the order in which they came. Shared tasks are sent to every worker, and each worker takes the lowest
unclaimed one: the batch that is wanted next never waits behind another one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import attrgetter

from fastq_loader.ipc.claim_table import ClaimTable
from fastq_loader.ipc.messages import Task


class TaskQueue:
    """Queue of the tasks that could be worked on next.

    Args:
        claims: the table of claims.
        shared: whether any worker may claim a task; else all tasks belong to this worker.
        worker: the worker's number.

    Attributes:
        waiting: the tasks. One that belongs to this worker, or follows the last, may be added there, too.
        take: takes the next waiting task, which then belongs to this worker; None if all shared
            ones have gone to others. Not a method, which would be one more call for each batch.
        retired: whether shared tasks are left to the other workers.
    """

    def __init__(self, claims: ClaimTable, shared: bool, worker: int) -> None:
        self._claims = claims
        self._shared = shared
        self._worker = worker
        self.waiting: deque[Task] = deque()  # popped from the left, also from a wide window
        self.retired = False
        self.take: Callable[[], Task | None] = self.waiting.popleft
        if shared:
            self.take = partial(claims.claim_first, self.waiting, worker)

    def __len__(self) -> int:
        return len(self.waiting)

    def add(self, task: Task) -> None:
        """Add a task. One that is sent again may be lower than tasks that came before it."""
        if self.retired:
            return
        if self.waiting and task.seq < self.waiting[-1].seq and self._shared:
            insort(self.waiting, task, key=attrgetter("seq"))
        else:
            self.waiting.append(task)

    def prune(self) -> None:
        """Drop the shared tasks that other workers have claimed. `take` works without it."""
        left = [task for task in self.waiting if self._claims.on_offer(task.ticket)]
        self.waiting.clear()
        self.waiting.extend(left)

    def drop(self) -> list[Task]:
        """Drop all tasks, because the epoch ends. Returns the tasks that only this worker can answer."""
        tasks = [] if self._shared else list(self.waiting)
        self.waiting.clear()
        self.retired = False  # a worker that cannot work reports it again at the first task that it claims
        return tasks

    def retire(self) -> None:
        """Leave shared tasks to the other workers, because this worker cannot work."""
        if self._shared:
            self.retired = True
            self.waiting.clear()

    def begin(self, task: Task | None) -> None:
        """Record the task that this worker works on, which is to blame if it dies; None after its answer."""
        self._claims.begin(self._worker, None if task is None else task.ticket)
