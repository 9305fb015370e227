"""Flow control: stops broadcasting tasks to workers that have not read earlier ones.

Pure. Every worker is sent every shared task, so the queue of a worker that is busy for long would collect all
tasks that the others load. After `limit` messages each worker is sent a ping, which it returns when it has
read it. A worker with `limit` more messages behind an unreturned ping is passed over. When it returns the
ping, it is sent the messages that it missed, except for tasks that were claimed meanwhile.

An idle worker reads everything and is never passed over. A busy one may finish when all the tasks it was sent
are claimed. It then has a ping to return, which wakes the consumer. The worker waits only if the consumer is
in the middle of a training step, once in about `limit` batches of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from fastq_loader.errors import ProtocolError

T = TypeVar("T")


class BroadcastFlowControl(Generic[T]):
    """Flow control of the messages broadcast to the workers of one pool; they may have any type.

    Args:
        limit: messages between two pings. If it is at least the window's size, no worker is passed over in an
            ordered epoch, because the others get no further than that past a late batch.

    Attributes:
        behind: workers that are passed over.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent = 0  # messages broadcast so far
        self._since: dict[int, int] = {}  # worker → value of `_sent` at its last ping
        self._next = 0  # value of `_sent` at which a worker is due for a ping or to be passed over
        self._pinged: set[int] = set()  # workers that have not returned it
        self._missed: dict[int, T] = {}  # ticket → a task that was not sent to every worker
        self._epoch: T | None = None
        self._outdated: set[int] = set()  # workers that were not sent the epoch's message
        self.behind: set[int] = set()

    def begin(self, worker: int) -> None:
        """Add a worker that starts, and will be sent the epoch and its tasks."""
        self._since[worker] = self._sent
        self._next = min(self._next, self._sent)

    def end(self, worker: int) -> None:
        """Remove a dead worker."""
        self._since.pop(worker, None)
        for workers in (self._pinged, self._outdated, self.behind):
            workers.discard(worker)
        if not self.behind:
            self._missed.clear()

    def announce(self, epoch: T) -> list[int]:
        """Count an epoch's message, sent to all workers except `behind`. Returns the workers to ping then."""
        self._pass_over()
        self._missed.clear()
        self._epoch = epoch
        self._outdated |= self.behind
        self._sent += 1
        return self._due()

    def offer(self, tasks: Mapping[int, T], on_offer: Callable[[int], bool]) -> list[int]:
        """Count tasks, sent to all workers except `behind`. Returns the workers to ping then.

        Args:
            tasks: ticket → task; all can be claimed.
            on_offer: whether a ticket can still be claimed.
        """
        if self._sent >= self._next:
            self._pass_over()
        if self.behind:
            self._missed.update(tasks)
            if len(self._missed) > 2 * self._limit:
                self._forget_claimed(on_offer)
        self._sent += len(tasks)
        return self._due() if self._sent >= self._next else []

    def read(self, worker: int) -> None:
        """Record that a worker has returned its ping.

        Raises:
            ProtocolError: it was not sent one.
        """
        if worker not in self._pinged:
            raise ProtocolError(f"worker {worker} returned a ping that it was not sent")
        self._pinged.discard(worker)

    def catch_up(self, on_offer: Callable[[int], bool]) -> tuple[dict[int, list[T]], list[int]]:
        """Return the missed messages for each worker that was passed over and has read the earlier ones, and
        the workers to ping then."""
        ready = self.behind - self._pinged
        if not ready:
            return {}, []
        self._forget_claimed(on_offer)
        tasks = list(self._missed.values())
        sends = {}
        for worker in ready:
            news = [self._epoch] if worker in self._outdated and self._epoch is not None else []
            sends[worker] = news + tasks
            self._since[worker] = self._sent - len(sends[worker])
        self.behind -= ready
        self._outdated -= ready
        if not self.behind:
            self._missed.clear()
        return sends, self._due()

    def _pass_over(self) -> None:
        for worker in self._pinged:
            if self._sent - self._since[worker] >= self._limit:
                self.behind.add(worker)

    def _forget_claimed(self, on_offer: Callable[[int], bool]) -> None:
        self._missed = {ticket: task for ticket, task in self._missed.items() if on_offer(ticket)}

    def _due(self) -> list[int]:
        """The workers to ping."""
        due, near = [], self._since.keys() - self.behind
        for worker in near:
            if self._sent - self._since[worker] >= self._limit and worker not in self._pinged:
                self._since[worker] = self._sent
                self._pinged.add(worker)
                due.append(worker)
        self._next = min((self._since[worker] for worker in near), default=self._sent) + self._limit
        return sorted(due)
