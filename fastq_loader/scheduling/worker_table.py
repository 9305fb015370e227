"""The workers of a pool as the scheduler sees them: how each of them is, and whose turn it is.

Pure. The turn is torch's: it goes around the workers that have something left to read, and in an epoch
without order it passes those that have their share of the window already.
"""

from __future__ import annotations

from fastq_loader.scheduling.states import ACTIVE, DEAD, DRY_DEAD, EXHAUSTED, worker_after

_GONE = frozenset((DEAD, DRY_DEAD))


class WorkerTable:
    """The states of a pool's workers, and their turns in one epoch.

    Args:
        workers: how many there are.
    """

    def __init__(self, workers: int) -> None:
        self._states = [ACTIVE] * workers
        self._turn = 0
        self._undelivered = [0] * workers

    def __len__(self) -> int:
        return len(self._states)

    def move(self, worker: int, event: str) -> None:
        self._states[worker] = worker_after(worker, self._states[worker], event)

    def begin_epoch(self) -> None:
        for worker in range(len(self)):
            self.move(worker, "epoch")
        self._turn = 0
        self._undelivered = [0] * len(self)

    def exhausted(self, worker: int) -> bool:
        """Whether the worker's part of an iterable dataset has ended."""
        return self._states[worker] in EXHAUSTED

    def dead(self, worker: int) -> bool:
        return self._states[worker] in _GONE

    def nobody_for(self, worker: int | None) -> bool:
        """Whether a task for `worker` (None: for anyone) would never be answered."""
        return self.nobody_left if worker is None else self.dead(worker)

    @property
    def nobody_left(self) -> bool:
        return all(state in _GONE for state in self._states)

    # ---- turns --------------------------------------------------------------------------------

    def take_turn(self, share_of: int | None) -> int | None:
        """The worker whose turn it is, which takes a batch; None if there is nobody to take it.

        Args:
            share_of: batches of a window in which nobody may have more than a part; None: no limit.
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
        going = sum(state not in EXHAUSTED for state in self._states)
        # torch's window is a multiple of the workers. Of another one no part is rounded down: a draw that
        # nobody takes would be lost.
        share = -(-window // going) if window % len(self) else window // going
        return self._undelivered[worker] < share

    def gave(self, worker: int) -> None:
        """A batch of the worker was handed out."""
        self._undelivered[worker] -= 1

    def undelivered(self, worker: int) -> int:
        return self._undelivered[worker]
