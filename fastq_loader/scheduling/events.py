"""Records that pass between the scheduler, which decides, and the event loop, which carries out.

Pure, immutable, and without behaviour. Those without fields are no tuples: empty ones would all be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from fastq_loader.ipc.messages import Task


@dataclass(frozen=True)
class Draw:
    """Ask the sampler for one more index, and report the answer; then the next batch may be there."""


class Send(NamedTuple):
    """Send a task to `worker`, or to all workers (None): the first that is free claims it."""

    worker: int | None
    task: Task


class Wait(NamedTuple):
    """Batch `seq` is next: wait for an arrival.

    Attributes:
        worker: has its task; None: whichever claimed it.
        behind: batches that are ready and wait for this one.
        attempt: how often its task was sent again.
        blocked: some worker has nothing to do, although there is more to load: the window is full.
    """

    worker: int | None
    seq: int
    behind: int
    attempt: int = 0
    blocked: bool = False


class Break(NamedTuple):
    """`worker` died at batch `seq` (None: between batches): the iteration ends with an error."""

    worker: int
    seq: int | None
    index: Any


@dataclass(frozen=True)
class Finish:
    """The epoch is over."""


class Died(NamedTuple):
    """`worker` is confirmed dead, and what it had sent has arrived.

    Attributes:
        seq: the batch that it was working on; None if there was none.
        cause: how it died.
        claimed: tickets of the shared tasks that it had claimed and not answered.
    """

    worker: int
    seq: int | None = None
    cause: str = "died"
    claimed: frozenset[int] = frozenset()
