"""Records passed between the scheduler, which decides, and the event loop, which acts.

Pure, immutable, and without behaviour. Empty records are dataclasses, because empty tuples are equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fastq_loader.ipc.messages import Task


@dataclass(frozen=True)
class Draw:
    """Draw one more index from the sampler and report the result; then the next batch may be ready."""


class Send(NamedTuple):
    """Send a task to `worker`, or to all workers (None): the first free one claims it."""

    worker: int | None
    task: Task


class Wait(NamedTuple):
    """Batch `seq` is next: wait for an arrival.

    Attributes:
        worker: has its task; None: whichever claimed it.
        behind: batches that are ready and wait for this one.
        attempt: how often its task was sent again.
        blocked: a worker is idle although there is more to load, because the window is full.
    """

    worker: int | None
    seq: int
    behind: int
    attempt: int = 0
    blocked: bool = False


class IterationFailed(NamedTuple):
    """`worker` died at batch `seq` (None: between batches): the iteration ends with an error."""

    worker: int
    seq: int | None
    index: Any


@dataclass(frozen=True)
class Finish:
    """The epoch is over."""


class Died(NamedTuple):
    """`worker` is confirmed dead, and everything it had sent has arrived.

    Attributes:
        seq: the batch that it was working on, or None.
        cause: how it died.
        claimed: tickets of the shared tasks that it had claimed and not answered.
    """

    worker: int
    seq: int | None = None
    cause: str = "died"
    claimed: frozenset[int] = frozenset()
