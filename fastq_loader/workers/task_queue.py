"""The tasks that a worker knows of and has not begun.

Runs in a worker, on its main thread. Assigned tasks are all its own, in the order in which they came. Shared
ones are known to every worker, and each takes the lowest unclaimed one: the batch that is wanted next is
never behind another one.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import deque
from operator import attrgetter

from fastq_loader.ipc.claim_table import Busy, ClaimTable
from fastq_loader.ipc.messages import Task

#: Seconds between two looks at a task that another worker is claiming.
_GLANCE = 50e-6


class TaskQueue:
    """Queue of the tasks that could be worked on next.

    Args:
        claims: the table of claims.
        shared: whether any worker may claim a task; else all are this worker's.
        worker: the worker's number.
    """

    def __init__(self, claims: ClaimTable, shared: bool, worker: int) -> None:
        self._claims = claims
        self._shared = shared
        self._worker = worker
        self._tasks: deque[Task] = deque()  # a wide window is taken from its left end, task by task
        self._retired = False

    def __len__(self) -> int:
        return len(self._tasks)

    def add(self, task: Task) -> None:
        """A task has come. One that is sent again may be lower than those that came before it."""
        if self._retired:
            return
        if self._tasks and task.seq < self._tasks[-1].seq and self._shared:
            insort(self._tasks, task, key=attrgetter("seq"))
        else:
            self._tasks.append(task)

    def prune(self) -> None:
        """Forget the shared tasks that others have claimed. `take` finds that out by itself."""
        self._tasks = deque(task for task in self._tasks if self._claims.on_offer(task.ticket))

    def drop(self) -> list[Task]:
        """The epoch ends: forget all tasks; those that wait for an answer of this worker."""
        tasks, self._tasks = self._tasks, deque()
        self._retired = False  # it says so again at the first task that it claims
        return [] if self._shared else list(tasks)

    def retire(self) -> None:
        """This worker cannot work: it leaves what is claimed to the others."""
        if self._shared:
            self._retired = True
            self._tasks.clear()

    def take(self) -> Task | None:
        """The next task to work on, which is this worker's from here on; None if there is none now."""
        task = self._next()
        if task is not None:
            self._claims.begin(self._worker, task.ticket)
        return task

    def answered(self) -> None:
        """The answer to the task that was taken last is on its way."""
        self._claims.begin(self._worker, None)

    def _next(self) -> Task | None:
        if not self._shared:
            return self._tasks.popleft() if self._tasks else None
        at = 0
        while at < len(self._tasks):
            task = self._tasks[at]
            try:
                mine = self._claims.claim(task.ticket, self._worker)
            except Busy:  # the other worker has it in a moment, or dies, and it is unclaimed
                at += 1
                continue
            del self._tasks[at]
            if mine:
                return task
        if self._tasks:
            time.sleep(_GLANCE)
        return None
