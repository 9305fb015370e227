"""Progress of an epoch: the batches that were delivered to the user.

Pure. It counts positions in the order: a batch, or the error in its place. Batches of an iterable dataset are
counted for each worker, because each worker reads its own part.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from typing import NamedTuple

#: Stands in for the state of a worker that has read beyond the delivered batches.
UNKNOWN = pickle.dumps({"unknown": True})


class WorkerProgress(NamedTuple):
    """Progress of one worker's batches.

    Attributes:
        delivered: number of batches.
        state: the worker's state after the last of them (see `reading.reader`), or b"".
    """

    delivered: int = 0
    state: bytes = b""


class Progress(NamedTuple):
    """Progress of an epoch.

    Attributes:
        delivered: number of positions delivered.
        beyond: delivered positions after the first undelivered one; only without order.
        workers: progress of each worker; empty where it is not needed.
        over: whether the epoch was exhausted.
    """

    delivered: int = 0
    beyond: frozenset[int] = frozenset()
    workers: tuple[WorkerProgress, ...] = ()
    over: bool = False

    @property
    def head(self) -> int:
        """The lowest position that was not delivered."""
        return self.delivered - len(self.beyond)

    def after(self, position: int) -> Progress:
        """Progress after another position of a map-style dataset was delivered."""
        if position == self.delivered and not self.beyond:  # the usual case, made fast
            return tuple.__new__(Progress, (position + 1, self.beyond, self.workers, False))
        beyond, head = self.beyond | {position}, self.head
        while head in beyond:
            beyond, head = beyond - {head}, head + 1
        return Progress(self.delivered + 1, beyond, self.workers)

    def after_worker(self, worker: int, state: bytes, position: int | None) -> Progress:
        """Progress after a batch of a worker was delivered.

        Args:
            worker: its number.
            state: the worker's state after the batch; b"" keeps its last one. If that is UNKNOWN, the dataset
                has no state: then no worker has one.
            position: of the batch; None for an iterable dataset.
        """
        after = (
            Progress(self.delivered + 1, self.beyond, self.workers)
            if position is None
            else self.after(position)
        )
        workers = list(self.workers)
        delivered, last = workers[worker]
        if not state and last == UNKNOWN:
            workers = [each._replace(state=b"") if each.state == UNKNOWN else each for each in workers]
            last = b""
        workers[worker] = WorkerProgress(delivered + 1, state or last)
        return Progress(after.delivered, after.beyond, tuple(workers))

    def at_end(self, states: Mapping[int, bytes]) -> Progress:
        """Progress at the end of the epoch. `states`: worker → its state at the end; other workers have the
        state after their last batch."""
        workers = enumerate(self.workers)
        left = tuple(WorkerProgress(0, states.get(number, worker.state)) for number, worker in workers)
        return Progress(self.delivered, self.beyond, left, over=True)


#: Nothing was delivered.
START = Progress()
