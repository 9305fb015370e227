"""The states of a batch and of a worker, as literal tables of the allowed transitions.

Pure. The scheduler changes states by these tables; a transition that is not listed is a defect and raises. A
`WorkerTable` is the scheduler's view of a pool's workers. Turns are torch's: round-robin over the workers
that have something left to read. In an epoch without order, workers that have their share of the window
already are skipped.
"""

from __future__ import annotations

from typing import Any

from fastq_loader.errors import Transitions, describe_index
from fastq_loader.ipc.messages import ENDED, Answer, Task, decode_index

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


class Batch:
    """A batch between the draw of its index and its delivery.

    Attributes:
        worker: worker with its task. None: any worker may claim it, or its index could not be drawn.
        attempt: how often its task was sent again.
        ticket: number under which its task is claimed; -1 before it was sent.
        sent: when its task was sent first, in nanoseconds of the monotonic clock; 0 before.
        loaded: who loaded it, and when; see `statistics.records.Record` from `seq` on.
        task: the task, as sent last.
        answer: the worker's answer, once it has arrived.
        error: why the batch failed, with no answer or an unusable one.
    """

    __slots__ = (
        *("answer", "attempt", "error", "index", "loaded", "sent"),
        *("seq", "state", "task", "ticket", "worker"),
    )

    def __init__(self, seq: int, worker: int | None, index: Any) -> None:
        self.seq = seq
        self.worker = worker
        self.index = index
        self.state = NEW
        self.attempt = 0
        self.ticket = -1
        self.sent = 0
        self.loaded: tuple[int, ...] = (seq, -1, 0, 0, 0, 0, 0, 0, 0)
        self.task: Task | None = None
        self.answer: Answer | None = None
        self.error: BaseException | None = None

    @property
    def is_end(self) -> bool:
        """Whether its answer is the end of its worker's part of an iterable dataset."""
        return self.answer is not None and self.answer.kind == ENDED

    def move(self, event: str) -> None:
        self.state = BATCH_TRANSITIONS[self.state, event]

    def __str__(self) -> str:
        return f"batch {self.seq} (indices {describe_index(decode_index(self.index))})"


class WorkerTable:
    """The states of a pool's workers, and their turns in an epoch.

    Args:
        workers: number of workers.

    Attributes:
        some_dead: whether at least one is dead.
    """

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._states = [ACTIVE] * workers
        self.some_dead = False
        self._turn = 0
        self._undelivered = [0] * workers

    def move(self, worker: int, event: str) -> None:
        self._states[worker] = WORKER_TRANSITIONS[self._states[worker], event]
        self.some_dead = not _DEAD.isdisjoint(self._states)

    def begin_epoch(self, first: int = 0) -> None:
        """Begin a new epoch, with batch `first`."""
        for worker in range(self._workers):
            self.move(worker, "epoch")
        self._turn = first % self._workers
        self._undelivered = [0] * self._workers

    def exhausted(self, worker: int) -> bool:
        """Whether the worker's part of an iterable dataset has ended."""
        return self._states[worker] in _EXHAUSTED

    def active(self) -> int:
        """Number of workers that have something left to read, including dead ones."""
        return sum(state not in _EXHAUSTED for state in self._states)

    def is_dead(self, worker: int | None) -> bool:
        """Whether `worker`, or all of them (None), is dead: a task for it would never be answered."""
        states = self._states if worker is None else (self._states[worker],)
        return _DEAD.issuperset(states)

    # ---- turns --------------------------------------------------------------------------------

    def take_turn(self, share_of: int | None) -> int | None:
        """Assign a batch to the worker whose turn it is, and return it; None if no worker can take a batch.

        Args:
            share_of: window, in batches, of which each worker may have an equal share; None for no limit.
        """
        states = self._states
        for _ in states:
            worker = self._turn
            self._turn = (worker + 1) % self._workers
            if states[worker] not in _EXHAUSTED and (share_of is None or self._has_room(worker, share_of)):
                self._undelivered[worker] += 1
                return worker
        return None

    def _has_room(self, worker: int, window: int) -> bool:
        going = self.active()
        # torch's window is a multiple of the workers. The share of any other window is rounded up: an index
        # that no worker takes would be lost.
        share = -(-window // going) if window % self._workers else window // going
        return self._undelivered[worker] < share

    def deliver_one(self, worker: int) -> None:
        """A batch of the worker was delivered."""
        self._undelivered[worker] -= 1
