"""The states of a batch and of a worker, as literal tables of the allowed transitions.

Pure. The scheduler changes states by these tables; a transition that is not listed is a defect and raises. A
`WorkerTable` is the scheduler's view of a pool's workers. Turns are torch's: round-robin over the workers
that have something left to read.
"""

from __future__ import annotations

from collections import deque

from fastq_loader.errors import Transitions

NEW, SENT, READY, HELD, LOST, GONE = "new", "sent", "ready", "held", "lost", "gone"

#: A lost batch's worker is dead: it is sent again, given up, or reported. A held batch has arrived after the
#: end of a worker's part of an iterable dataset, which takes effect first.
BATCH_TRANSITIONS = Transitions(
    "a batch",
    {
        NEW: {"send": SENT, "fail": READY, "send_to_dead": LOST},
        SENT: {"answer": READY, "end": GONE, "skip": GONE, "fail": READY, "die": LOST},
        READY: {"deliver": GONE, "hold": HELD},
        HELD: {"release": READY},
        LOST: {"break": GONE, "replay": SENT, "fail": READY},
    },
)

#: A dry worker's part of an iterable dataset is exhausted: its death costs nothing in this epoch.
ACTIVE, DRY, DEAD, DRY_DEAD = "active", "dry", "dead", "dry_dead"

WORKER_TRANSITIONS = Transitions(
    "a worker",
    {
        ACTIVE: {"end": DRY, "die": DEAD, "epoch": ACTIVE},
        DRY: {"die": DRY_DEAD, "epoch": ACTIVE},
        DEAD: {"end": DRY_DEAD, "epoch": DEAD, "replace": ACTIVE},  # end: sent before its death
        DRY_DEAD: {"epoch": DEAD},
    },
)

_EXHAUSTED = frozenset((DRY, DRY_DEAD))
_DEAD = frozenset((DEAD, DRY_DEAD))


class WorkerTable:
    """The states of a pool's workers, and their turns in an epoch.

    Args:
        workers: number of workers.

    Attributes:
        some_dead: whether at least one is dead.
        turns: the workers that have something left to read, also dead ones; the next one first.
    """

    def __init__(self, workers: int) -> None:
        self._states = [ACTIVE] * workers
        self.some_dead = False
        self.turns = deque(range(workers))

    def move(self, worker: int, event: str) -> None:
        self._states[worker] = WORKER_TRANSITIONS[self._states[worker], event]
        self.some_dead = not _DEAD.isdisjoint(self._states)
        if self._states[worker] in _EXHAUSTED and worker in self.turns:
            self.turns.remove(worker)

    def begin_epoch(self, first: int = 0) -> None:
        """Begin a new epoch, with batch `first`."""
        for worker in range(len(self._states)):
            self.move(worker, "epoch")
        self.turns = deque(range(len(self._states)))
        self.turns.rotate(-first)

    def exhausted(self, worker: int) -> bool:
        """Whether the worker's part of an iterable dataset has ended."""
        return self._states[worker] in _EXHAUSTED

    def is_dead(self, worker: int | None) -> bool:
        """Whether `worker`, or all of them (None), is dead: a task for it would never be answered."""
        states = self._states if worker is None else (self._states[worker],)
        return _DEAD.issuperset(states)

    def share(self, window: int) -> int:
        """The most batches of a window that one worker may have, so that a quick one does not fill it."""
        going = len(self.turns)
        # torch's window is a multiple of the workers. The share of any other window is rounded up: an index
        # that no worker takes would be lost.
        return -(-window // going) if window % len(self._states) else window // going
