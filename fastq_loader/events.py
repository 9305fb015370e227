"""What goes into the scheduler and what comes out: events in, instructions out, all immutable.

Pure, and without behaviour: the scheduler decides, the iterator carries out.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from fastq_loader.messages import Answer

# ---- instructions ---------------------------------------------------------------------------------


class Draw(NamedTuple):
    """Take the next index of the sampler and report it."""


class Send(NamedTuple):
    """Send a task to `worker`, with the blocks (offset, size) that it is granted and promised, and with the
    address ranges that it gets back."""

    worker: int
    epoch: int
    seq: int
    index: Any
    grants: tuple[tuple[int, int], ...]
    promises: tuple[tuple[int, int], ...]
    space: tuple[tuple[int, int], ...]


class Deliver(NamedTuple):
    """Hand out what is at this place: an answer of a worker, or an error from before any worker."""

    seq: int
    worker: int | None
    answer: Answer | None
    error: BaseException | None


class Wait(NamedTuple):
    """The head of the line, batch `seq`, is with `worker`: wait for an arrival."""

    worker: int
    seq: int


class Break(NamedTuple):
    """`worker` died with batch `seq` (None: between batches); the iteration ends with an error."""

    worker: int
    seq: int | None
    index: Any


class Finish(NamedTuple):
    """The epoch is over."""


Instruction = Draw | Send | Deliver | Wait | Break | Finish

# ---- events ---------------------------------------------------------------------------------------


class EpochStarted(NamedTuple):
    epoch: int


class Drawn(NamedTuple):
    """The sampler yielded `index`."""

    index: Any


class DrawFailed(NamedTuple):
    """The sampler raised `error` instead of yielding an index."""

    error: BaseException


class Undeliverable(NamedTuple):
    """The task of a `Send` could not be put into a message."""

    send: Send
    error: BaseException


class Arrived(NamedTuple):
    """`worker` answered."""

    worker: int
    answer: Answer


class Died(NamedTuple):
    """`worker` is confirmed dead, and what it had sent has arrived."""

    worker: int


class Wanted(NamedTuple):
    """The user waits for the next batch."""


Event = EpochStarted | Drawn | DrawFailed | Undeliverable | Arrived | Died | Wanted
