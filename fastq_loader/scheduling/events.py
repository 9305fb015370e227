"""What goes into the scheduler and what comes out: events in, instructions out, all immutable.

Pure, and without behaviour: the scheduler decides, the event loop carries out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import Answer

# ---- instructions ---------------------------------------------------------------------------------


class Draw(NamedTuple):
    """Take the next index of the sampler and report it."""


class Send(NamedTuple):
    """Send a task to `worker` (None: to all, one of them will claim it under the ticket), with the blocks
    (offset, size) that may be written to, and those that may be once they are let go."""

    worker: int | None
    epoch: int
    seq: int
    attempt: int
    index: Any
    grants: tuple[tuple[int, int], ...]
    promises: tuple[tuple[int, int], ...]
    ticket: int


class Replace(NamedTuple):
    """Start a new `worker` in the place of the dead one, which had batch `seq` (None: none) in hand."""

    worker: int
    seq: int | None


class Deliver(NamedTuple):
    """Hand out what is at this place: an answer of a worker, or an error from before any worker."""

    seq: int
    worker: int | None
    answer: Answer | None
    error: BaseException | None


class Wait(NamedTuple):
    """The head of the line, batch `seq`, is with `worker` (None: with whoever claimed it): wait for an
    arrival. `behind`: batches that are ready and wait for it."""

    worker: int | None
    seq: int
    behind: int


class Break(NamedTuple):
    """`worker` died with batch `seq` (None: between batches); the iteration ends with an error."""

    worker: int
    seq: int | None
    index: Any


class Finish(NamedTuple):
    """The epoch is over."""


Instruction = Draw | Send | Deliver | Wait | Break | Replace | Finish

# ---- events ---------------------------------------------------------------------------------------


class EpochStarted(NamedTuple):
    """A new epoch begins. Of the tasks for anyone that came before it, those with the tickets in `taken_back`
    will not be answered any more, and those in `claimed` by the worker that has them."""

    epoch: int
    taken_back: frozenset[int] = frozenset()
    claimed: Mapping[int, int] = {}


class Drawn(NamedTuple):
    """The sampler yielded `index`."""

    index: Any


class Exhausted(NamedTuple):
    """The sampler has nothing more."""


class DrawFailed(NamedTuple):
    """The sampler raised `error` instead of yielding an index."""

    error: BaseException


class Undeliverable(NamedTuple):
    """The task of a `Send` could not be put into a message."""

    send: Send
    error: BaseException


class Arrived(NamedTuple):
    """`worker` answered. `fault`: why nothing in the answer can be believed but that it is one."""

    worker: int
    answer: Answer
    fault: ProtocolError | None = None


class Died(NamedTuple):
    """`worker` is confirmed dead, and what it had sent has arrived.

    Attributes:
        seq: the batch that it had claimed or, where tasks are addressed, begun; None if there was none.
        words: how it died.
        unheard: tickets of all that it had claimed, whose answers were lost with it.
    """

    worker: int
    seq: int | None = None
    words: str = "died"
    unheard: frozenset[int] = frozenset()


class Wanted(NamedTuple):
    """The user waits for the next batch."""


class Idle(NamedTuple):
    """The head of the line is late, and nothing else has come: the consumer is about to sleep."""


Event = EpochStarted | Drawn | Exhausted | DrawFailed | Undeliverable | Arrived | Died | Wanted | Idle
