"""The states of a batch and of a worker, as literal tables: what may follow what, and nothing else.

Pure. The scheduler moves its records by these tables; a step that no table lists is a defect and raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

from fastq_loader.errors import InvalidTransition, describe_index
from fastq_loader.ipc.messages import Answer, Task, decode_index
from fastq_loader.memory.blocks import Extents, Holder

NEW, SENT, READY, LOST, GONE = "new", "sent", "ready", "lost", "gone"

#: state → event → next state. A lost batch's worker is dead: it is sent again, given up, or reported.
BATCH_TRANSITIONS: dict[str, dict[str, str]] = {
    NEW: {"send": SENT, "fail": READY, "send_to_dead": LOST},
    SENT: {"answer": READY, "end": GONE, "skip": GONE, "fail": READY, "die": LOST},
    READY: {"deliver": GONE},
    LOST: {"break": GONE, "replay": SENT, "fail": READY},
    GONE: {},
}

#: A dry worker's part of an iterable dataset is exhausted: its death costs nothing in this epoch.
ACTIVE, DRY, DEAD, DRY_DEAD = "active", "dry", "dead", "dry_dead"

WORKER_TRANSITIONS: dict[str, dict[str, str]] = {
    ACTIVE: {"end": DRY, "die": DEAD, "epoch": ACTIVE},
    DRY: {"die": DRY_DEAD, "epoch": ACTIVE},
    DEAD: {"end": DRY_DEAD, "epoch": DEAD, "replace": ACTIVE},  # end: its last word came before its death
    DRY_DEAD: {"epoch": DEAD},
}

EXHAUSTED = frozenset((DRY, DRY_DEAD))


class _Table(dict[tuple[str, str], str]):
    def __missing__(self, step: tuple[str, str]) -> NoReturn:
        raise InvalidTransition("a batch is {}: event {!r} is not allowed".format(*step))


#: (state, event) → next state: the table of batches, for one look.
NEXT = _Table(
    {(state, event): to for state, moves in BATCH_TRANSITIONS.items() for event, to in moves.items()}
)


class Batch:
    """A batch between the draw of its index and its delivery.

    Attributes:
        worker: who has its task. None: any worker may claim it, or its index could not be drawn.
        attempt: how often it was sent again.
        ticket: under which its task is claimed; -1 before it was sent.
        task: as it was sent last.
        answer: what it was answered with, from its arrival on.
        error: why it failed without an answer, or with one that cannot be used.
    """

    __slots__ = ("answer", "attempt", "error", "index", "seq", "state", "task", "ticket", "worker")

    def __init__(self, seq: int, worker: int | None, index: Any) -> None:
        self.seq = seq
        self.worker = worker
        self.index = index
        self.state = NEW
        self.attempt = 0
        self.ticket = -1
        self.task: Task | None = None
        self.answer: Answer | None = None
        self.error: BaseException | None = None

    @property
    def holder(self) -> Holder:
        """In whose name the pool keeps the blocks of its task."""
        return Holder(None, self.ticket) if self.worker is None else Holder(self.worker)

    @property
    def blocks(self) -> Extents:
        """What its task may write to, now or once it is let go."""
        return () if self.task is None else self.task.grants + self.task.promises

    def move(self, event: str) -> None:
        self.state = NEXT[self.state, event]

    def __str__(self) -> str:
        return f"batch {self.seq} (indices {describe_index(decode_index(self.index))})"


def worker_after(worker: int, state: str, event: str) -> str:
    """The state of `worker` after an event."""
    following = WORKER_TRANSITIONS[state].get(event)
    if following is None:
        raise InvalidTransition(f"worker {worker} is {state}: event {event!r} is not allowed")
    return following
