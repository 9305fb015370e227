"""The line of an epoch's batches: from the draw of their indices to their place at the head.

Pure. What is ready waits in the reorder ring; what will never come (a worker's part of an iterable dataset
had ended) is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from fastq_loader.ipc.messages import BATCH, Answer
from fastq_loader.scheduling.events import Arrived
from fastq_loader.scheduling.ring import ReorderRing
from fastq_loader.scheduling.states import LOST, SENT, Batch

#: An answer, or an error from where no worker answers.
Outcome = tuple[Answer | None, BaseException | None]


class Unanswered(NamedTuple):
    """A batch that failed without an answer, or without one that can be believed."""

    seq: int
    error: BaseException


class InFlight:
    """The batches that were asked for and not handed out.

    Args:
        capacity: how many there can be.

    Attributes:
        drawn: how many were asked for so far; the next one's number.
    """

    def __init__(self, capacity: int) -> None:
        self.drawn = 0
        self._batches: dict[int, Batch] = {}
        self._ring: ReorderRing[Outcome] = ReorderRing(capacity)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self._batches.values())

    def __getitem__(self, seq: int) -> Batch:
        return self._batches[seq]

    def get(self, seq: int) -> Batch | None:
        return self._batches.get(seq)

    @property
    def head(self) -> int:
        """The lowest sequence number that was not delivered."""
        return self._ring.head

    @property
    def waiting(self) -> int:
        """Batches that are ready and not at the head."""
        return len(self._ring)

    def new(self, worker: int | None, index: Any) -> Batch:
        batch = self._batches[self.drawn] = Batch(self.drawn, worker, index)
        self.drawn += 1
        return batch

    def push(self, batch: Batch, outcome: Outcome) -> None:
        """A batch is ready."""
        self._ring.push(batch.seq, outcome)

    def pop(self) -> Outcome | None:
        """What is ready at the head, which moves on; None if it is not."""
        return self._ring.pop_ready() if self._ring.ready() else None

    def upcoming(self, inbox: Iterable[Any], count: int, in_order: bool) -> list[Answer]:
        """The answers with a batch among the next `count` to be handed out, as far as they came: in order the
        first ones of the line, else those in `inbox`. What else is ready is not looked at, because this
        is asked for at every batch."""
        if in_order:
            batches = [self._batches.get(seq) for seq in range(self.head, self.head + count)]
            answers = (batch.answer for batch in batches if batch is not None and batch.answer is not None)
        else:
            answers = (event.answer for event in inbox if type(event) is Arrived)
        return list(islice((answer for answer in answers if answer.outcome == BATCH), count))

    def skip(self) -> None:
        """The batch at the head is handed out without having waited."""
        self._ring.skip()

    def leave(self, batch: Batch, event: str) -> None:
        """A batch was handed out, or never will be."""
        batch.move(event)
        del self._batches[batch.seq]

    def head_batch(self, exhausted: Callable[[int], bool]) -> Batch | None:
        """The batch at the head of the line, past those that will never come; None at the end.

        Args:
            exhausted: whether a worker's part of an iterable dataset has ended.
        """
        ring = self._ring
        while ring.head < self.drawn:
            batch = self._batches.get(ring.head)
            if batch is not None:
                if batch.state != SENT or batch.worker is None or not exhausted(batch.worker):
                    return batch
                self.leave(batch, "skip")
            ring.skip()
        return None

    def lost_by(self, worker: int) -> Batch | None:
        """The lowest batch that a dead worker lost; None if there is none."""
        return next((batch for batch in self if batch.worker == worker and batch.state == LOST), None)

    def clear(self) -> list[Answer]:
        """Forget everything; the answers that were waiting."""
        self._batches.clear()
        return [answer for answer, _ in self._ring.drain() if answer is not None]

    def answers(self) -> list[Answer]:
        """What is ready, in no particular order."""
        return [answer for answer, _ in self._ring.items() if answer is not None]
