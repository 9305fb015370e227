"""The batches in flight, the reorder ring that puts them in order, and the tasks that are to be answered.

Pure. A batch enters when its index is drawn and leaves when it is handed out. A batch that is ready early
waits in the ring. One that will never come, because its worker's part of an iterable dataset had ended, is
skipped.

`PendingTasks` are of this epoch and of older ones. A ticket is the number under which an attempt at a batch
is claimed, and no other attempt ever has it. The table of claims is a ring: the slot of a ticket is its
number modulo the slots. A task keeps its slot as long as it can be claimed, or as only the table knows who
has claimed it. A number whose slot is taken is passed over, so a batch may be as late as it likes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from typing import Any, Generic, TypeVar

from fastq_loader.errors import InvalidTransition
from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import LOST, SENT, Batch

T = TypeVar("T")

_EMPTY: Any = object()


class ReorderRing(Generic[T]):
    """A bounded ring of slots, one for each sequence number from `head` to `head + capacity - 1`.

    Args:
        capacity: slots, in batches; at least 1.
        head: the first sequence number.

    Attributes:
        head: the lowest sequence number that has not left the ring.
        filled: items in the ring.
    """

    def __init__(self, capacity: int, head: int = 0) -> None:
        if capacity < 1:
            raise ValueError(f"capacity={capacity} must be at least 1")
        self.capacity = capacity
        self.head = head
        self._slots: list[T] = [_EMPTY] * capacity
        self.filled = 0

    def push(self, seq: int, item: T) -> None:
        """Store `item` under `seq`.

        Raises:
            ValueError: `seq` has left the ring, lies beyond it, or is taken. Each would break exactly-once.
        """
        if not self.head <= seq < self.head + self.capacity:
            raise ValueError(f"seq={seq} lies outside the ring [{self.head}, {self.head + self.capacity})")
        slot = seq % self.capacity
        if self._slots[slot] is not _EMPTY:
            raise ValueError(f"seq={seq} is in the ring already")
        self._slots[slot] = item
        self.filled += 1

    def pop(self) -> T | None:
        """The head's item, and the head moves on; None if it is not here."""
        slot = self.head % self.capacity
        item = self._slots[slot]
        if item is _EMPTY:
            return None
        self._slots[slot] = _EMPTY
        self.filled -= 1
        self.head += 1
        return item

    def skip(self) -> None:
        """Move past a head that will never come.

        Raises:
            ValueError: the head's item is here and would be lost.
        """
        if self._slots[self.head % self.capacity] is not _EMPTY:
            raise ValueError(f"seq={self.head} is in the ring and would be lost")
        self.head += 1

    def items(self) -> list[T]:
        """The items in the ring, in no particular order."""
        return [item for item in self._slots if item is not _EMPTY]

    def clear(self) -> None:
        """Empty the ring without moving its head."""
        self._slots = [_EMPTY] * self.capacity
        self.filled = 0


class InFlight:
    """The batches of one epoch that were asked for and not handed out.

    Args:
        capacity: how many there can be.
        head: the first one's number.
        done: numbers that are passed over.

    Attributes:
        drawn: the next one's number.
        batches: by their numbers.
        ring: those that have come, and wait for others.
    """

    def __init__(self, capacity: int, head: int = 0, done: frozenset[int] = frozenset()) -> None:
        self._done = done
        self.drawn = head
        self.batches: dict[int, Batch] = {}
        self.ring: ReorderRing[Batch] = ReorderRing(capacity, head)

    def new(self, worker: int | None, index: Any) -> Batch:
        while self.drawn in self._done:
            self.drawn += 1
        batch = self.batches[self.drawn] = Batch(self.drawn, worker, index)
        self.drawn += 1
        return batch

    def upcoming(self, arrivals: Iterable[Any], count: int, in_order: bool) -> list[Answer]:
        """The answers with a batch among the next `count` to be handed out, up to the first that has not
        come: in order those of the first batches in flight, else those in `arrivals`."""
        batches: Iterable[Any] = (batch for batch in arrivals if type(batch) is Batch)
        if in_order:
            batches = filter(None, map(self.batches.get, range(self.ring.head, self.ring.head + count)))
        answers = takewhile(lambda answer: answer is not None, (batch.answer for batch in batches))
        return list(islice((answer for answer in answers if answer.kind == BATCH), count))

    def leave(self, batch: Batch, event: str) -> None:
        """A batch was handed out, or never will be."""
        batch.move(event)
        del self.batches[batch.seq]

    def head_batch(self, exhausted: Callable[[int], bool]) -> Batch | None:
        """The batch at the head, past those that will never come; None at the end.

        Args:
            exhausted: whether a worker's part of an iterable dataset has ended.
        """
        ring = self.ring
        while ring.head < self.drawn:
            batch = self.batches.get(ring.head)
            if batch is not None:
                if batch.state != SENT or batch.worker is None or not exhausted(batch.worker):
                    return batch
                self.leave(batch, "skip")
            ring.skip()
        return None

    def lost_by(self, worker: int) -> Batch | None:
        """The lowest batch that a dead worker lost; None if there is none."""
        return next(
            (batch for batch in self.batches.values() if batch.worker == worker and batch.state == LOST), None
        )

    def clear(self) -> None:
        """Forget everything."""
        self.batches.clear()
        self.ring.clear()

    def answers(self) -> list[Answer]:
        """The answers that wait in the ring, in no particular order."""
        return [batch.answer for batch in self.ring.items() if batch.answer is not None]


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
