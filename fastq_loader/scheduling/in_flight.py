"""The batches in flight, and the unanswered tasks.

Pure. A batch enters when its index is drawn and leaves when it is delivered. One that will never arrive,
because its worker's part of an iterable dataset has ended, is skipped.

`PendingTasks` contains unanswered tasks of this epoch and of older ones. A ticket is the number under which
one attempt at a batch is claimed; it is never reused. The claim table is a ring: the slot of a ticket is its
number modulo the number of slots. A task keeps its slot while it can be claimed, or while only the table
knows its claimant. A number whose slot is taken is skipped, so a batch may be arbitrarily late.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastq_loader.ipc.messages import Answer
from fastq_loader.scheduling.arrivals import AsTheyCome, InOrder
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import LOST, SENT, Batch


class InFlight:
    """The batches of one epoch that were requested and not delivered.

    Args:
        first: sequence number of the first one.
        done: sequence numbers to skip.

    Attributes:
        drawn: sequence number of the next one.
        batches: sequence number → batch.
    """

    def __init__(self, first: int = 0, done: frozenset[int] = frozenset()) -> None:
        self._done = done
        self.drawn = first
        self.batches: dict[int, Batch] = {}

    def new(self, worker: int | None, index: Any) -> Batch:
        while self.drawn in self._done:
            self.drawn += 1
        batch = self.batches[self.drawn] = Batch(self.drawn, worker, index)
        self.drawn += 1
        return batch

    def leave(self, batch: Batch, event: str) -> None:
        """Remove a batch that was delivered, or never will be."""
        batch.move(event)
        del self.batches[batch.seq]

    def head_batch(self, arrivals: InOrder | AsTheyCome, exhausted: Callable[[int], bool]) -> Batch | None:
        """The batch at the head, after skipping batches that were delivered or will never arrive; None at the
        end.

        Args:
            arrivals: the arrived batches, with the head.
            exhausted: whether a worker's part of an iterable dataset has ended.
        """
        while arrivals.head < self.drawn:
            batch = self.batches.get(arrivals.head)
            if batch is not None:
                if batch.state != SENT or batch.worker is None or not exhausted(batch.worker):
                    return batch
                self.leave(batch, "skip")
            arrivals.skip()
        return None

    def lost_by(self, worker: int) -> Batch | None:
        """The lowest batch that was lost with a dead worker, or None."""
        return next(
            (batch for batch in self.batches.values() if batch.worker == worker and batch.state == LOST), None
        )

    def answers(self) -> list[Answer]:
        """The undelivered answers, in no particular order."""
        return [batch.answer for batch in self.batches.values() if batch.answer is not None]


class PendingTasks(dict[tuple[int, int], Batch]):
    """(epoch, seq) → the batch of an unanswered task.

    Args:
        slots: number of slots in the claim table.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = slots
        self._taken: set[int] = set()  # slots
        self._next = 1  # 0 is not a ticket: a fresh table offers nothing

    def add(self, epoch: int, batch: Batch) -> None:
        """Add a task that is about to be sent, under a new ticket."""
        if batch.worker is None:
            assert len(self._taken) < self._slots, "windows are narrower than the claim table"
            while self._next % self._slots in self._taken:
                self._next += 1
            self._taken.add(self._next % self._slots)
        batch.ticket = self._next
        self._next += 1
        self[epoch, batch.seq] = batch

    def settle(self, epoch: int, seq: int) -> Batch:
        """Remove a task that was answered, or never will be."""
        batch = self.pop((epoch, seq))
        if batch.worker is None:
            self.release_slot(batch)
        return batch

    def release_slot(self, batch: Batch) -> None:
        """Release the claim-table slot of a task whose claimant is known."""
        self._taken.discard(batch.ticket % self._slots)

    def match_answer(self, worker: int, answer: Answer) -> Batch | None:
        """The batch to which an answer belongs; None if `worker` has no such task, or the attempt is over."""
        batch = self.get((answer.epoch, answer.seq))
        if batch is None or batch.worker not in (None, worker) or batch.attempt != answer.attempt:
            return None
        return batch

    def lost_with(self, died: Died, now: int, last: bool) -> list[tuple[int, int]]:
        """Keys of the tasks that will not be answered because a worker is dead.

        Args:
            died: report of its death.
            now: number of the current epoch.
            last: whether no worker is left to claim a task.
        """
        return [
            key
            for key, batch in self.items()
            if batch.worker == died.worker
            or (batch.worker is None and (last or batch.ticket in died.claimed or key == (now, died.seq)))
        ]

    def seq_of(self, epoch: int, ticket: int | None) -> int | None:
        """The sequence number of the unanswered task with this epoch and ticket, or None."""
        found = (seq for (of, seq), batch in self.items() if of == epoch and batch.ticket == ticket)
        return next(found, None)

    def tickets(self) -> list[int]:
        """The tickets of the shared tasks that have no known claimant."""
        return [batch.ticket for batch in self.values() if batch.worker is None]

    def has_idle_worker(self, workers: int) -> bool:
        """Whether some of `workers` workers have nothing to do. An unclaimed task occupies one worker."""
        busy: set[int] = set()
        claimable = 0
        for batch in self.values():
            if batch.worker is None:
                claimable += 1
            else:
                busy.add(batch.worker)
            if len(busy) + claimable >= workers:
                return False
        return workers > 0

    def check(self) -> None:
        """Raise AssertionError unless exactly the unclaimed shared tasks have a slot."""
        tickets = self.tickets()
        slots = {ticket % self._slots for ticket in tickets}
        assert len(slots) == len(tickets), "two tasks share a slot of the claim table"
        assert slots == self._taken, "a slot is taken without a task, or a task has no slot"
