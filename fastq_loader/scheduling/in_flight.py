"""The batches in flight, in one of two orders of delivery, and the unanswered tasks.

Pure. A batch enters when its index is drawn and leaves when it is delivered, in order (`InOrder`) or as it
comes (`AsTheyCome`). The end of a worker's part of an iterable dataset is an event, which takes effect when
it is processed, and not when it arrives: then batches that will never arrive are skipped. So is a death.

`PendingTasks` contains unanswered tasks of this epoch and of older ones. A ticket is the number under which
one attempt at a batch is claimed; it is never reused. The claim table is a ring: the slot of a ticket is its
number modulo the number of slots. A task keeps its slot while it can be claimed, or while only the table
knows its claimant. A number whose slot is taken is skipped, so a batch may be arbitrarily late.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from typing import Any

from fastq_loader.ipc.messages import BATCH, ENDED, Answer
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import HELD, LOST, READY, SENT, Batch


class InFlight:
    """The batches of one epoch that were requested and not delivered.

    Args:
        first: sequence number of the first one.
        done: sequence numbers to skip.

    Attributes:
        head: the lowest sequence number that was not delivered.
        drawn: sequence number of the next batch to be requested.
        batches: sequence number → batch.
        filled: number of batches that have arrived; without order, also of ends and deaths.
        shares_window: whether a worker may have an equal share of the window only: a quick one would fill it.
    """

    shares_window = False

    def __init__(self, first: int = 0, done: frozenset[int] = frozenset()) -> None:
        self._done = done
        self.head = self.drawn = first
        self.batches: dict[int, Batch] = {}
        self.filled = 0

    def new(self, worker: int | None, index: Any) -> Batch:
        while self.drawn in self._done:
            self.drawn += 1
        batch = self.batches[self.drawn] = Batch(self.drawn, worker, index)
        self.drawn += 1
        return batch

    def leave(self, batch: Batch, event: str) -> None:
        """Remove a batch that never will be delivered."""
        batch.move(event)
        del self.batches[batch.seq]

    def head_batch(self, exhausted: Callable[[int], bool]) -> Batch | None:
        """The batch at the head, after skipping what was delivered or will never arrive; None at the end.

        Args:
            exhausted: whether a worker's part of an iterable dataset has ended.
        """
        while self.head < self.drawn:
            batch = self.batches.get(self.head)
            if batch is not None:
                if batch.state != SENT or batch.worker is None or not exhausted(batch.worker):
                    return batch
                self.leave(batch, "skip")
            self.head += 1
        return None


class InOrder(InFlight):
    """Batches that are delivered in order: only the one at the head, once it has arrived.

    torch takes arrivals off its queue one at a time, and only while the batch at the head is missing. That
    matters after the end of a worker's part, because another index is drawn for it: whatever arrives after
    such an end waits behind it. A death is reported at the position of each batch that was lost by it.
    """

    def __init__(self, first: int = 0, done: frozenset[int] = frozenset()) -> None:
        super().__init__(first, done)
        self._from_an_end_on: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """A batch has arrived, or has failed."""
        answer = batch.answer
        if self._from_an_end_on or (answer is not None and answer.kind == ENDED):
            if batch.state == READY:
                batch.move("hold")
            self._from_an_end_on.append(batch)
        else:
            self.filled += 1

    def add_death(self, died: Died) -> None:
        """A worker has died, and was not replaced."""

    def take(self) -> Batch | None:
        """Return the batch at the head, and advance the head; None if it is not here."""
        if self.head not in self.batches or (batch := self.batches[self.head]).state != READY:
            return None
        self.filled -= 1
        self.head += 1
        return batch

    def next_event(self, head: Batch) -> Batch | Died | None:
        """The event to process while `head`, the next batch, is missing: `head` itself if it is lost, or the
        end of a worker's part; None: wait."""
        if head.state == LOST:
            return head
        if not self._from_an_end_on:
            return None
        end, *others = self._from_an_end_on
        self._from_an_end_on.clear()
        for batch in others:  # up to the next end
            if batch.state == HELD:
                batch.move("release")
            self.add(batch)
        return end

    def upcoming(self, count: int) -> list[Answer]:
        """The answers with a batch among the next `count` to be delivered, up to the first missing one."""
        batches = map(self.batches.get, range(self.head, self.head + count))
        return _answers(filter(None, batches), count)


class AsTheyCome(InFlight):
    """Batches that are delivered in the order of arrival, with the ends and deaths between them."""

    shares_window = True

    def __init__(self, first: int = 0, done: frozenset[int] = frozenset()) -> None:
        super().__init__(first, done)
        self._arrivals: deque[Batch | Died] = deque()

    def add(self, arrival: Batch | Died) -> None:
        """See `InOrder`."""
        self._arrivals.append(arrival)
        self.filled += 1

    add_death = add

    def take(self) -> Batch | None:
        """Return the next batch; None if nothing has arrived, or an event comes before it."""
        if not self._arrivals or type(first := self._arrivals[0]) is not Batch or first.is_end:
            return None
        self.filled -= 1
        self._arrivals.popleft()
        return first

    def next_event(self, head: Batch) -> Batch | Died | None:
        """The event before the next batch; `head` if nothing has arrived and it is lost; None: wait."""
        if self._arrivals:
            self.filled -= 1
            return self._arrivals.popleft()
        return head if head.state == LOST else None

    def upcoming(self, count: int) -> list[Answer]:
        """See `InOrder`."""
        return _answers((batch for batch in self._arrivals if type(batch) is Batch), count)


def _answers(batches: Iterable[Batch], count: int) -> list[Answer]:
    answers = takewhile(lambda answer: answer is not None, (batch.answer for batch in batches))
    return list(islice((answer for answer in answers if answer is not None and answer.kind == BATCH), count))


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
