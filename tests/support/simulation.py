"""Workers without processes, for tests of the scheduler. The task queue is the product's own.

A simulated worker reads its inbox, takes tasks, writes to granted blocks or makes new ones, and answers, in
steps that a test interleaves as it likes. Between any two steps it can hang or be killed.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable

from fastq_loader.ipc.claim_table import Busy, ClaimTable
from fastq_loader.ipc.messages import PART_ENDED, SKIPPED, Answer, BeginEpoch, Space, Task
from fastq_loader.memory.blocks import Extents, FreeRanges, size_class
from fastq_loader.workers.task_queue import TaskQueue

REGION = 1 << 40  # bytes of address range for each worker


def region(worker: int) -> tuple[int, int]:
    return worker * REGION, (worker + 1) * REGION


class SimulatedArena:
    """The parts of the workers' memory, without any memory."""

    retired = False

    def __init__(self) -> None:
        self.mapping = self
        self.released: list[int] = []

    region = staticmethod(region)

    def released_blocks(self) -> list[int]:
        released, self.released = self.released, []
        return released

    def punch(self, offset: int, size: int) -> None:
        """There are no pages to give back."""


class Table(ClaimTable):
    """A table with few slots, in this process alone: claims need no lock.

    Attributes:
        busy: ticket → the worker that was stopped in the middle of claiming it.
    """

    def __init__(self, slots: int) -> None:
        self._words, self._size = defaultdict[int, int](int), slots  # type: ignore[assignment]
        self.busy: dict[int, int] = {}

    def slot(self, ticket: int) -> int:
        return ticket % self._size

    def claiming(self, ticket: int) -> int | None:
        return self.busy.get(ticket)

    def _claim(self, ticket: int, who: int) -> bool:
        if ticket in self.busy:
            raise Busy
        free = self.on_offer(ticket)
        if free:
            self._words[self.slot(ticket)] |= who
        return free


class Loaded(Answer):
    """An answer, and the blocks of its batch as (offset, bytes needed)."""

    used: Extents = ()

    def put_into(self, used: Iterable[tuple[int, int]]) -> Loaded:
        self.used = tuple(used)
        return self


class SimulatedWorker:
    """One worker process, from its start to its death.

    Args:
        number: its own.
        table: of claims.
        shared: whether tasks are shared; else they are assigned.
        space: ranges in which it may make blocks.

    Attributes:
        task: what it works on.
        answers: sent, and not received yet.
        hung: it does nothing any more.
    """

    def __init__(self, number: int, table: Table, shared: bool, space: Extents) -> None:
        self.number = number
        self.tasks = TaskQueue(table, shared, number)
        self.inbox: deque[Task | BeginEpoch | Space] = deque()
        self.task: Task | None = None
        self.answers: deque[Loaded] = deque()
        self.alive = True
        self.hung = False
        self._space = FreeRanges(space)
        self._ended = False
        self._clock = 0

    def knows(self) -> list[Task]:
        """The tasks that it could take."""
        queued = [message for message in self.inbox if isinstance(message, Task)]
        return [*self.tasks.waiting, *queued]

    def unfinished(self) -> list[Task]:
        return self.knows() if self.task is None else [self.task, *self.knows()]

    def begin(self, look: bool) -> bool:
        """Take the next task; after a quick one a worker does not read its messages before. Whether it works
        on one now."""
        if self.task is None:
            if look or not self.tasks:
                self._look()
            self.task = self.tasks.take() if self.tasks else None
            if self.task is not None:
                self.tasks.begin(self.task)
        return self.task is not None

    def _look(self) -> None:
        while self.inbox:
            message = self.inbox.popleft()
            if isinstance(message, Task):
                self.tasks.add(message)
            elif isinstance(message, Space):
                for offset, size in message.ranges:
                    self._space.free_ranges(((offset, size),))
            else:
                for task in self.tasks.drop():
                    self._answer(task, SKIPPED, ())
                self._ended = False

    def finish(self, kind: int, sizes: tuple[int, ...]) -> Loaded:
        """Answer the task with a batch of leaves of so many bytes."""
        task, self.task = self.task, None
        assert task is not None
        if self._ended:
            kind = SKIPPED
        self._ended = self._ended or kind == PART_ENDED
        answer = self._answer(task, kind, () if kind in (SKIPPED, PART_ENDED) else sizes)
        self.tasks.begin(None)
        return answer

    def _answer(self, task: Task, kind: int, sizes: tuple[int, ...]) -> Loaded:
        grants, used, fresh = list(task.grants), [], []
        for nbytes in sizes:
            wanted = size_class(nbytes)
            fits = next((grant for grant in grants if wanted <= grant[1] <= 2 * wanted), None)
            if fits is not None:
                grants.remove(fits)
                used.append((fits[0], nbytes))
                continue
            offset = self._space.take(wanted)
            assert offset is not None
            fresh.append((offset, wanted))
            used.append((offset, nbytes))
        self._clock += 1
        written = {offset for offset, _ in used}
        at_hand = [offset for offset, _ in task.grants if offset not in written]
        head = task.epoch, task.seq, task.attempt, kind, self._clock, self._clock
        self.answers.append(Loaded(*head, tuple(fresh), tuple(at_hand), None).put_into(used))
        return self.answers[-1]
