"""The messages that busy workers have not read: a worker that is far behind is passed over.

Pure. Every worker is sent every shared task, so a worker that is busy for long would have in its queue all
that the others load. After a number of messages each worker is sent a ping, which it sends back when it has
read it. A worker that has as many messages behind the ping is passed over until then. When the ping is back,
it is sent what it has missed, except for the tasks that were claimed meanwhile.

An idle worker reads everything and is never passed over. A busy one may be done when all the tasks that it
knows were claimed. It has a ping to send back then, and that wakes the consumer. The worker waits only where
the consumer is in the middle of a training step, once in so many batches of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from fastq_loader.errors import ProtocolError

T = TypeVar("T")


class Backlog(Generic[T]):
    """The messages for all workers of one pool, of whatever type.

    Args:
        limit: messages from one ping to the next. With at least as many as the window has batches, no worker
            is passed over in an epoch with order, because the others come no further past a batch.

    Attributes:
        behind: workers that were passed over.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sent = 0  # messages to all, ever
        self._since: dict[int, int] = {}  # worker → of these, those up to its last ping
        self._next = 0  # of these, those after which a worker is due for a ping or to be passed over
        self._pinged: set[int] = set()  # workers that have not sent it back
        self._missed: dict[int, T] = {}  # ticket → a task that a worker was not sent
        self._epoch: T | None = None
        self._outdated: set[int] = set()  # workers that were not sent the epoch
        self.behind: set[int] = set()

    def begin(self, worker: int) -> None:
        """A worker starts, and will be told of the epoch and of its tasks."""
        self._since[worker] = self._sent
        self._next = min(self._next, self._sent)

    def end(self, worker: int) -> None:
        """A worker is dead."""
        self._since.pop(worker, None)
        for workers in (self._pinged, self._outdated, self.behind):
            workers.discard(worker)
        if not self.behind:
            self._missed.clear()

    def announce(self, epoch: T) -> list[int]:
        """An epoch begins: the message goes to all workers but those `behind`. Returns which to ping then."""
        self._pass_over()
        self._missed.clear()
        self._epoch = epoch
        self._outdated |= self.behind
        self._sent += 1
        return self._due()

    def offer(self, tasks: Mapping[int, T], on_offer: Callable[[int], bool]) -> list[int]:
        """These tasks, by ticket, go to all workers but those `behind`. Returns which to ping then.

        Args:
            tasks: they can be claimed.
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
        """A worker has sent its ping back.

        Raises:
            ProtocolError: it was not sent one.
        """
        if worker not in self._pinged:
            raise ProtocolError(f"worker {worker} sent a ping back that it had not got")
        self._pinged.discard(worker)

    def catch_up(self, on_offer: Callable[[int], bool]) -> tuple[dict[int, list[T]], list[int]]:
        """The messages for the workers that were passed over and have read what came before; and which to
        ping then."""
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
