"""The workers of a pool as the scheduler sees them: the state of each, and whose turn it is.

Pure. Turns are torch's: they go round the workers that have something left to read. In an epoch without order
they pass over workers that have their share of the window already.
"""

from __future__ import annotations

from fastq_loader.scheduling.states import ACTIVE, DEAD, DRY_DEAD, EXHAUSTED, worker_after

_DEAD = frozenset((DEAD, DRY_DEAD))


class WorkerTable:
    """The states of a pool's workers, and their turns in an epoch.

    Args:
        workers: how many there are.

    Attributes:
        some_dead: one is dead, at least.
    """

    def __init__(self, workers: int) -> None:
        self._states = [ACTIVE] * workers
        self.some_dead = False
        self._turn = 0
        self._undelivered = [0] * workers

    def __len__(self) -> int:
        return len(self._states)

    def move(self, worker: int, event: str) -> None:
        self._states[worker] = worker_after(worker, self._states[worker], event)
        self.some_dead = not _DEAD.isdisjoint(self._states)

    def begin_epoch(self, first: int = 0) -> None:
        """A new epoch begins, with batch `first`."""
        for worker in range(len(self)):
            self.move(worker, "epoch")
        self._turn = first % len(self)
        self._undelivered = [0] * len(self)

    def exhausted(self, worker: int) -> bool:
        """Whether the worker's part of an iterable dataset has ended."""
        return self._states[worker] in EXHAUSTED

    def active(self) -> int:
        """Workers that can be given tasks."""
        return sum(state not in EXHAUSTED for state in self._states)

    def is_dead(self, worker: int | None) -> bool:
        """Whether `worker`, or all of them (None), is dead: a task for it would never be answered."""
        states = self._states if worker is None else (self._states[worker],)
        return _DEAD.issuperset(states)

    # ---- turns --------------------------------------------------------------------------------

    def take_turn(self, share_of: int | None) -> int | None:
        """The worker whose turn it is, which takes a batch; None if no worker can take one.

        Args:
            share_of: batches of a window of which each worker may have its part; None: no limit.
        """
        states = self._states
        for _ in states:
            worker = self._turn
            self._turn = (worker + 1) % len(states)
            if states[worker] not in EXHAUSTED and (share_of is None or self._has_room(worker, share_of)):
                self._undelivered[worker] += 1
                return worker
        return None

    def _has_room(self, worker: int, window: int) -> bool:
        going = self.active()
        # torch's window is a multiple of the workers. The part of any other is rounded up: an index that no
        # worker takes would be lost.
        share = -(-window // going) if window % len(self) else window // going
        return self._undelivered[worker] < share

    def gave(self, worker: int) -> None:
        """A batch of the worker was handed out."""
        self._undelivered[worker] -= 1

    def undelivered(self, worker: int) -> int:
        return self._undelivered[worker]
