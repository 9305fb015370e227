"""The tasks that workers have still to answer, of this epoch and of older ones, and their tickets.

Pure. A ticket is the number under which an attempt at a batch is claimed, and no other attempt ever has it.
The table of claims is a ring: a ticket's slot in it is its remainder. A slot is taken as long as the task
can be claimed, or only the table knows who has claimed it. A number whose slot is taken is passed over, so
however late a batch is, the numbers that come round go past it.
"""

from __future__ import annotations

from fastq_loader.errors import InvalidTransition
from fastq_loader.ipc.messages import Answer
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import Batch


class Outstanding(dict[tuple[int, int], Batch]):
    """(epoch, seq) → the batch of a task that is to be answered.

    Args:
        slots: in the table of claims.
    """

    def __init__(self, slots: int) -> None:
        super().__init__()
        self._slots = slots
        self._taken: set[int] = set()  # slots
        self._next = 1  # 0 is no ticket: a table that nobody has written to offers nothing

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
        """A task was answered, or will not be."""
        batch = self.pop((epoch, seq))
        if batch.worker is None:
            self._taken.discard(batch.ticket % self._slots)
        return batch

    def found(self, batch: Batch) -> None:
        """It is known who has claimed a task: the table is not asked for it any more."""
        self._taken.discard(batch.ticket % self._slots)

    def expects(self, worker: int, answer: Answer) -> bool:
        """Whether `worker` may give this answer: this attempt is its own, or could have been claimed."""
        batch = self.get((answer.epoch, answer.seq))
        return batch is not None and batch.worker in (None, worker) and batch.attempt == answer.attempt

    def of(self, epoch: int, worker: int | None) -> list[tuple[int, int]]:
        """(seq, attempt) of an epoch's tasks that `worker` (None: anyone) has to answer, ascending."""
        outstanding = [(seq, batch) for (of, seq), batch in self.items() if of == epoch]
        return sorted((seq, batch.attempt) for seq, batch in outstanding if batch.worker == worker)

    def lost_with(self, died: Died, now: int, last: bool) -> list[tuple[int, int]]:
        """The tasks that nobody will answer any more now that a worker is dead.

        Args:
            died: what is known of it.
            now: the epoch.
            last: no worker is left to claim anything.
        """
        return [
            key
            for key, batch in self.items()
            if batch.worker == died.worker
            or (batch.worker is None and (last or batch.ticket in died.claimed or key == (now, died.seq)))
        ]

    def ticket_of(self, epoch: int, seq: int) -> int | None:
        """The ticket of a task that is anyone's; None if it is known whose it is, or it was answered."""
        batch = self.get((epoch, seq))
        return None if batch is None or batch.worker is not None else batch.ticket

    def seq_of(self, epoch: int, ticket: int | None) -> int | None:
        """The batch of an epoch that has a ticket and is to be answered; None if there is none."""
        found = (seq for (of, seq), batch in self.items() if of == epoch and batch.ticket == ticket)
        return next(found, None)

    def tickets(self) -> list[int]:
        """The tickets of all tasks that are anyone's, as far as is known here."""
        return [batch.ticket for batch in self.values() if batch.worker is None]

    def check(self) -> None:
        """Raise AssertionError unless every task that can be claimed has a slot, and nothing else has."""
        tickets = self.tickets()
        slots = {ticket % self._slots for ticket in tickets}
        assert len(slots) == len(tickets), "two tasks have one slot in the table of claims"
        assert slots == self._taken, "a slot is taken by nobody, or a task has none"
