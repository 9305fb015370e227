"""The tasks that a worker has received and not begun.

Runs in a worker, on its main thread. Assigned tasks all belong to the worker, which takes them in the order
in which they came. Shared tasks are sent to every worker, and each worker takes the lowest unclaimed one: the
batch that is wanted next never waits behind another one.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from fastq_loader.ipc.claim_table import Busy, ClaimTable
from fastq_loader.ipc.messages import Task
from fastq_loader.system.unpatched import time

#: Seconds between two looks at a task that another worker is claiming.
_GLANCE = 50e-6


class TaskQueue:
    """Queue of the tasks that could be worked on next.

    Args:
        claims: the table of claims.
        shared: whether any worker may claim a task; else all tasks belong to this worker.
        worker: the worker's number.
    """

    def __init__(self, claims: ClaimTable, shared: bool, worker: int) -> None:
        self._claims = claims
        self._shared = shared
        self._worker = worker
        self._tasks: deque[Task] = deque()  # popped from the left, also from a wide window
        self._retired = False

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> None:
        """Add a task. One that is sent again may be lower than tasks that came before it."""
        if self._retired:
            return
        if self._tasks and task.seq < self._tasks[-1].seq and self._shared:
            insort(self._tasks, task, key=attrgetter("seq"))
        else:
            self._tasks.append(task)

    def prune(self) -> None:
        """Drop the shared tasks that other workers have claimed. `take` works without it."""
        self._tasks = deque(task for task in self._tasks if self._claims.on_offer(task.ticket))

    def drop(self) -> list[Task]:
        """Drop all tasks, because the epoch ends. Returns the tasks that only this worker can answer."""
        tasks, self._tasks = self._tasks, deque()
        self._retired = False  # a worker that cannot work reports it again at the first task that it claims
        return [] if self._shared else list(tasks)

    def retire(self) -> None:
        """Leave shared tasks to the other workers, because this worker cannot work."""
        if self._shared:
            self._retired = True
            self._tasks.clear()

    def take(self) -> Task | None:
        """Take the next task to work on, which then belongs to this worker; None without a task."""
        task = self._next()
        if task is not None:
            self.begin(task)
        return task

    def begin(self, task: Task | None) -> None:
        """Record the task that this worker works on, which is to blame if it dies; None after its answer."""
        self._claims.begin(self._worker, None if task is None else task.ticket)

    def _next(self) -> Task | None:
        if not self._shared:
            return self._tasks.popleft() if self._tasks else None
        at = 0
        while at < len(self._tasks):
            task = self._tasks[at]
            try:
                mine = self._claims.claim(task.ticket, self._worker)
            except Busy:  # the other worker will have claimed it in a moment, or dies before
                at += 1
                continue
            del self._tasks[at]
            if mine:
                return task
        if self._tasks:
            time.sleep(_GLANCE)
        return None
