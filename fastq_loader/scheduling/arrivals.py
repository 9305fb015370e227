"""The batches that have arrived and wait for their delivery: in the order of the sampler, or as they come.

Pure. `InOrder` and `AsTheyCome` are the two orders of delivery. The end of a worker's part of an iterable
dataset is an event: it takes effect when it is processed, and not when it arrives. So is a worker's death.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice, takewhile
from typing import Any, Generic, TypeVar

from fastq_loader.ipc.messages import BATCH, ENDED, Answer
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import LOST, Batch

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
        """Remove and return the head's item, and advance the head; None if the item is not here."""
        slot = self.head % self.capacity
        item = self._slots[slot]
        if item is _EMPTY:
            return None
        self._slots[slot] = _EMPTY
        self.filled -= 1
        self.head += 1
        return item

    def skip(self) -> None:
        """Advance past a head that will never arrive.

        Raises:
            ValueError: the head's item is here and would be lost.
        """
        if self._slots[self.head % self.capacity] is not _EMPTY:
            raise ValueError(f"seq={self.head} is in the ring and would be lost")
        self.head += 1


class InOrder(ReorderRing[Batch]):
    """Delivers only the batch at the head of the ring.

    torch takes its arrivals off a queue one at a time, and only while the batch at the head is missing. That
    matters after the end of a worker's part, because another index is drawn for it: whatever arrives after
    such an end waits behind it. A death is reported at the position of each batch that was lost by it.
    """

    #: Whether a worker may have an equal share of the window only: else one that is quick would fill it.
    shares_window = False

    def __init__(self, capacity: int, head: int) -> None:
        super().__init__(capacity, head)
        self._behind_an_end: deque[Batch] = deque()

    def add(self, batch: Batch) -> None:
        """A batch has arrived, or has failed."""
        answer = batch.answer
        if self._behind_an_end or (answer is not None and answer.kind == ENDED):
            self._behind_an_end.append(batch)
        else:
            self.push(batch.seq, batch)

    def add_death(self, died: Died) -> None:
        """A worker has died, and was not replaced."""

    take = ReorderRing.pop

    def next_event(self, head: Batch) -> Batch | Died | None:
        """The event to process while `head`, the next batch, is missing: `head` itself if it is lost, the end
        of a worker's part, or a batch that was behind one and has taken its place now; None if there is no
        event."""
        if head.state == LOST:
            return head
        if not self._behind_an_end:
            return None
        batch = self._behind_an_end.popleft()
        if not _is_end(batch):
            self.push(batch.seq, batch)
        return batch

    def upcoming(self, batches: dict[int, Batch], count: int) -> list[Answer]:
        """The answers with a batch among the next `count` to be delivered, up to the first missing one."""
        return _answers(filter(None, map(batches.get, range(self.head, self.head + count))), count)


class AsTheyCome:
    """Delivers batches in the order of arrival, with the ends and deaths between them.

    Attributes:
        head: the lowest sequence number that was not delivered.
        filled: batches, ends and deaths that have arrived.
    """

    shares_window = True

    def __init__(self, capacity: int, head: int) -> None:
        self.head = head
        self.filled = 0
        self._queue: deque[Batch | Died] = deque()

    def add(self, arrival: Batch | Died) -> None:
        """See `InOrder.add`."""
        self._queue.append(arrival)
        self.filled += 1

    add_death = add

    def take(self) -> Batch | None:
        """Remove and return the next batch; None if there is none, or an event comes before it."""
        if not self._queue or type(first := self._queue[0]) is not Batch or _is_end(first):
            return None
        self.filled -= 1
        self._queue.popleft()
        return first

    def skip(self) -> None:
        """Advance past a head that was delivered, or will never arrive."""
        self.head += 1

    def next_event(self, head: Batch) -> Batch | Died | None:
        """The event that comes before the next batch; `head` if nothing has arrived and it is lost; None if
        there is no event."""
        if self._queue:
            self.filled -= 1
            return self._queue.popleft()
        return head if head.state == LOST else None

    def upcoming(self, batches: dict[int, Batch], count: int) -> list[Answer]:
        """See `InOrder.upcoming`."""
        return _answers((batch for batch in self._queue if type(batch) is Batch), count)


def _is_end(batch: Batch) -> bool:
    """Whether a batch was answered by the end of its worker's part of an iterable dataset."""
    return batch.answer is not None and batch.answer.kind == ENDED


def _answers(batches: Iterable[Batch], count: int) -> list[Answer]:
    answers = takewhile(lambda answer: answer is not None, (batch.answer for batch in batches))
    return list(islice((answer for answer in answers if answer is not None and answer.kind == BATCH), count))
