"""The tasks that workers have still to answer, of this epoch and of older ones, and their tickets.

Pure. A ticket is the number under which an attempt at a batch is claimed, and no other attempt ever has it.
The table of claims is a ring: the slot of a ticket is its number modulo the slots. A task keeps its slot as
long as it can be claimed, or as only the table knows who has claimed it. A number whose slot is taken is
passed over, so a batch may be as late as it likes.
"""

from __future__ import annotations

from fastq_loader.errors import InvalidTransition
from fastq_loader.ipc.messages import Answer
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import Batch


class PendingTasks(dict[tuple[int, int], Batch]):
    """(epoch, seq) → the batch of a task that is to be answered.

    Args:
        slots: in the table of claims.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = slots
        self._taken: set[int] = set()  # slots
        self._next = 1  # 0 is not a ticket: a fresh table offers nothing

    def add(self, epoch: int, batch: Batch) -> None:
        """A task is about to be sent, under a new ticket.

        Raises:
            InvalidTransition: no slot is free for it; windows are narrower than the table.
        """
        if batch.worker is None:
            if len(self._taken) >= self._slots:
                raise InvalidTransition(f"all {self._slots} slots of the table of claims are taken")
            while self._next % self._slots in self._taken:
                self._next += 1
            self._taken.add(self._next % self._slots)
        batch.ticket = self._next
        self._next += 1
        self[epoch, batch.seq] = batch

    def settle(self, epoch: int, seq: int) -> Batch:
        """A task was answered, or never will be."""
        batch = self.pop((epoch, seq))
        if batch.worker is None:
            self.free_slot(batch)
        return batch

    def free_slot(self, batch: Batch) -> None:
        """It is known who has claimed a task: the table is not asked for it again."""
        self._taken.discard(batch.ticket % self._slots)

    def due(self, worker: int, answer: Answer) -> Batch | None:
        """The batch that is answered; None if `worker` has no such task, or this attempt is over."""
        batch = self.get((answer.epoch, answer.seq))
        if batch is None or batch.worker not in (None, worker) or batch.attempt != answer.attempt:
            return None
        return batch

    def lost_with(self, died: Died, now: int, last: bool) -> list[tuple[int, int]]:
        """The tasks that will not be answered, now that a worker is dead.

        Args:
            died: what is known of its death.
            now: the epoch.
            last: no worker is left to claim a task.
        """
        return [
            key
            for key, batch in self.items()
            if batch.worker == died.worker
            or (batch.worker is None and (last or batch.ticket in died.claimed or key == (now, died.seq)))
        ]

    def seq_of(self, epoch: int, ticket: int | None) -> int | None:
        """The batch of an epoch that is to be answered under a ticket; None if there is none."""
        found = (seq for (of, seq), batch in self.items() if of == epoch and batch.ticket == ticket)
        return next(found, None)

    def tickets(self) -> list[int]:
        """The tickets of the shared tasks of which it is not known who has claimed them."""
        return [batch.ticket for batch in self.values() if batch.worker is None]

    def leave_idle(self, workers: int) -> bool:
        """Whether some of so many workers have nothing to do. A task that is to be claimed occupies one."""
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
        """Raise AssertionError unless exactly the tasks that can be claimed have a slot."""
        tickets = self.tickets()
        slots = {ticket % self._slots for ticket in tickets}
        assert len(slots) == len(tickets), "two tasks have one slot in the table of claims"
        assert slots == self._taken, "a slot is taken by no task, or a task has none"
