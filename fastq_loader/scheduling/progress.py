"""Which batches of an epoch were handed to the user.

Pure. What is counted is positions in the order: a batch, or the error that stood in its place. The batches of
an iterable dataset are counted for each worker, because each reads a part of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class WorkerProgress(NamedTuple):
    """Progress of one worker's batches.

    Attributes:
        delivered: how many.
        state: what the worker said of itself after the last of them (see `reading.reader`), or b"".
    """

    delivered: int = 0
    state: bytes = b""


class Progress(NamedTuple):
    """How far an epoch has come.

    Attributes:
        delivered: positions that were handed out.
        beyond: those past the first that was not; only without order.
        workers: of each worker, where that is of use.
        over: the epoch was exhausted.
    """

    delivered: int = 0
    beyond: frozenset[int] = frozenset()
    workers: tuple[WorkerProgress, ...] = ()
    over: bool = False

    @property
    def head(self) -> int:
        """The lowest position that was not handed out."""
        return self.delivered - len(self.beyond)

    def after(self, position: int) -> Progress:
        """A position of a dataset with indices is handed out as well."""
        if position == self.delivered and not self.beyond:  # as a rule; and quicker so
            return tuple.__new__(Progress, (position + 1, self.beyond, self.workers, False))
        beyond, head = self.beyond | {position}, self.head
        while head in beyond:
            beyond, head = beyond - {head}, head + 1
        return Progress(self.delivered + 1, beyond, self.workers)

    def after_worker(self, worker: int, state: bytes, position: int | None) -> Progress:
        """A batch of a worker is handed out, which said `state` after it.

        Args:
            worker: its number.
            state: b"": it said nothing.
            position: of the batch; None for an iterable dataset.
        """
        after = (
            Progress(self.delivered + 1, self.beyond, self.workers)
            if position is None
            else self.after(position)
        )
        workers = list(self.workers)
        workers[worker] = WorkerProgress(workers[worker].delivered + 1, state or workers[worker].state)
        return Progress(after.delivered, after.beyond, tuple(workers))

    def at_end(self, said: Mapping[int, bytes]) -> Progress:
        """The epoch is over, at whose end workers `said` a state, by their numbers; others stand where they
        stood after their last batch."""
        workers = enumerate(self.workers)
        left = tuple(WorkerProgress(0, said.get(number, worker.state)) for number, worker in workers)
        return self._replace(workers=left, over=True)


#: Nothing was handed out.
START = Progress()
