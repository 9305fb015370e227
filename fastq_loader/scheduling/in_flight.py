"""The batches in flight, in one of two orders of delivery, and the unanswered tasks.

Pure. A batch enters when its index is drawn and leaves when it is delivered, in order (`InOrder`) or as it
comes (`AsTheyCome`). A worker's death and the end of its part of an iterable dataset are events: they take
effect when they are processed, not when they arrive. After such an end, batches that will never arrive are
skipped.

`PendingTasks` contains unanswered tasks of this epoch and of older ones. A ticket is the number under which
one attempt at a batch is claimed; it is never reused. The claim table is a ring: the slot of a ticket is its
number modulo the number of slots. A task keeps its slot while it can be claimed, or while only the table
knows its claimant. A number whose slot is taken is skipped, so a batch may be arbitrarily late.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import islice, takewhile
from typing import Any

from fastq_loader.errors import describe_index
from fastq_loader.ipc.messages import BATCH, PART_ENDED, Answer, BatchHandle, Task, decode_index
from fastq_loader.memory.blocks import Extents
from fastq_loader.scheduling.events import Died
from fastq_loader.scheduling.states import BATCH_TRANSITIONS, HELD, LOST, NEW, READY, SENT, WorkerTable


class Batch:
    """A batch from the draw of its index to its delivery: what is known of it is an attribute.

    Args:
        seq: its number in the epoch.
        worker: worker with its task. None: any worker may claim it, or its index could not be drawn.
        index: the sampler's.

    Attributes:
        attempt: how often its task was sent again.
        ticket: number under which its task is claimed; -1 before it was sent.
        sent: when its task was sent first, in nanoseconds of the monotonic clock; 0 before.
        task: the task, as sent last.
        answer: the worker's answer, once it has arrived.
        handle: that of the answer, with its layout; see `Unpacker.check`.
        used: the blocks that it lies in, as (offset, bytes needed).
        worker_state, remarks: those of the answer, unsealed; b"" and None without any.
        loaded: who loaded it, and when; see `statistics.records.Record` from `seq` on.
        copy: its copy to a device, once that was begun.
        error: why the batch failed, with no answer or an unusable one.
    """

    state = NEW
    attempt = sent = 0
    ticket = -1
    task: Task | None = None
    answer: Answer | None = None
    handle: BatchHandle | None = None
    used: Extents = ()
    worker_state = b""
    remarks: Any = None
    copy: Any = None
    error: BaseException | None = None

    def __init__(self, seq: int, worker: int | None, index: Any) -> None:
        self.seq = seq
        self.worker = worker
        self.index = index
        self.loaded: tuple[int, ...] = (seq, -1, 0, 0, 0, 0, 0, 0, 0)

    @property
    def is_end(self) -> bool:
        """Whether its answer is the end of its worker's part of an iterable dataset."""
        return self.answer is not None and self.answer.kind == PART_ENDED

    def move(self, event: str) -> None:
        self.state = BATCH_TRANSITIONS[self.state, event]

    def __str__(self) -> str:
        return f"batch {self.seq} (indices {describe_index(decode_index(self.index))})"


class InFlight:
    """The batches of one epoch that were requested and not delivered.

    Args:
        start: sequence number of the first one.
        done: sequence numbers to skip.

    Attributes:
        head: the lowest sequence number that was not delivered.
        drawn: sequence number of the next batch to be requested.
        batches: sequence number → batch.
        filled: number of batches that have arrived; without order, also of ends and deaths.
        is_next_here: whether `take` returns a batch; without order, something that has arrived.
    """

    is_next_here = False

    def __init__(self, start: int = 0, done: frozenset[int] = frozenset()) -> None:
        self._done = done
        self.head = self.drawn = start
        self.batches: dict[int, Batch] = {}
        self.filled = 0

    def turn(self, workers: WorkerTable, window: int) -> int | None:
        """The worker whose turn it is to load a batch; None if no worker can take one.

        Args:
            workers: their states and turns.
            window: its size, in batches.
        """
        turns = workers.turns
        if not turns:
            return None
        turns.rotate(-1)
        return turns[-1]

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
                    self.is_next_here |= batch.state == READY
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

    def __init__(self, start: int = 0, done: frozenset[int] = frozenset()) -> None:
        super().__init__(start, done)
        self._from_an_end_on: list[Batch] = []

    def add(self, batch: Batch) -> None:
        """A batch has arrived, or has failed."""
        answer = batch.answer
        if self._from_an_end_on or (answer is not None and answer.kind == PART_ENDED):
            if batch.state == READY:
                batch.move("hold")
            self._from_an_end_on.append(batch)
        else:
            self.filled += 1
            self.is_next_here |= batch.seq == self.head

    def add_death(self, died: Died) -> None:
        """A worker has died, and was not replaced."""

    def take(self) -> Batch | None:
        """Return the batch at the head, and advance the head; None if it is not here."""
        if not self.is_next_here:
            return None
        batch = self.batches[self.head]
        self.filled -= 1
        self.head += 1
        following = self.batches.get(self.head)
        self.is_next_here = following is not None and following.state == READY
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

    def upcoming(self, count: int) -> list[Batch]:
        """Those among the next `count` to be delivered that are no errors, up to the first missing one."""
        batches = map(self.batches.get, range(self.head, self.head + count))
        return _loaded(filter(None, batches), count)


class AsTheyCome(InFlight):
    """Batches that are delivered in the order of arrival, with the ends and deaths between them.

    Each worker has an equal share of the window: a quick one would fill it.
    """

    def __init__(self, start: int = 0, done: frozenset[int] = frozenset()) -> None:
        super().__init__(start, done)
        self._arrivals: deque[Batch | Died] = deque()
        self._of: Counter[int | None] = Counter()  # worker → its batches in flight

    def turn(self, workers: WorkerTable, window: int) -> int | None:
        for _ in range(len(workers.turns)):
            worker = super().turn(workers, window)
            if self._of[worker] < workers.share(window):
                return worker
        return None

    def new(self, worker: int | None, index: Any) -> Batch:
        self._of[worker] += 1
        return super().new(worker, index)

    def leave(self, batch: Batch, event: str) -> None:
        self._of[batch.worker] -= 1
        super().leave(batch, event)

    def add(self, arrival: Batch | Died) -> None:
        """See `InOrder`."""
        self._arrivals.append(arrival)
        self.filled += 1
        self.is_next_here = True

    add_death = add

    def take(self) -> Batch | None:
        """Return the next batch; None if nothing has arrived, or an event comes before it."""
        if not self._arrivals or type(first := self._arrivals[0]) is not Batch or first.is_end:
            return None
        self._pop()
        self._of[first.worker] -= 1
        return first

    def _pop(self) -> Batch | Died:
        self.filled -= 1
        self.is_next_here = self.filled > 0
        return self._arrivals.popleft()

    def next_event(self, head: Batch) -> Batch | Died | None:
        """The event before the next batch; `head` if nothing has arrived and it is lost; None: wait."""
        if self._arrivals:
            return self._pop()
        return head if head.state == LOST else None

    def upcoming(self, count: int) -> list[Batch]:
        """See `InOrder`."""
        return _loaded((batch for batch in self._arrivals if type(batch) is Batch), count)


def _loaded(batches: Iterable[Batch], count: int) -> list[Batch]:
    here = takewhile(lambda batch: batch.answer is not None, batches)
    return list(islice((batch for batch in here if batch.answer and batch.answer.kind == BATCH), count))


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
