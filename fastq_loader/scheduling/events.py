"""What happens seldom goes into the scheduler as an event, and what is to be done comes out as instructions.

Pure, immutable, and without behaviour: the scheduler decides, the event loop carries out. What happens for
every batch has a method of the scheduler's instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastq_loader.ipc.messages import Task
from fastq_loader.scheduling.progress import START, Progress

# ---- instructions ---------------------------------------------------------------------------------


class Draw(NamedTuple):
    """Ask the sampler for an index so many times, and report each answer."""

    times: int


class Send(NamedTuple):
    """Send a task to `worker`, or to all workers (None): the first that is free claims it."""

    worker: int | None
    task: Task


class Replace(NamedTuple):
    """Start a new process for `worker`, which died at batch `seq` (None: at none). `cause`: how it died."""

    worker: int
    seq: int | None
    cause: str


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


class Finish(NamedTuple):
    """The epoch is over."""


Instruction = Draw | Send | Wait | Break | Replace | Finish

# ---- events ---------------------------------------------------------------------------------------


class EpochStarted(NamedTuple):
    """A new epoch begins.

    Attributes:
        epoch: its number.
        taken_back: tickets of older shared tasks that no worker can claim any more.
        claimed: ticket → worker of the older ones that a worker has claimed.
        done: positions that are not drawn, because they were handed out before: the epoch is a resumed one.
    """

    epoch: int
    taken_back: frozenset[int] = frozenset()
    claimed: Mapping[int, int] = {}
    done: Progress = START


class Exhausted(NamedTuple):
    """The sampler has nothing more."""


class DrawFailed(NamedTuple):
    """The sampler raised `error` instead of yielding an index."""

    error: BaseException


class Undeliverable(NamedTuple):
    """The task of a `Send` could not be put into a message."""

    send: Send
    error: BaseException


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


class Idle(NamedTuple):
    """The next batch is late and nothing else has come: the consumer is about to sleep."""


Event = EpochStarted | Exhausted | DrawFailed | Undeliverable | Died | Idle
