"""How a call of `next()` has ended, as a value.

Runs in the consumer. The event loop puts an outcome down where the iterator finds it, and the iterator raises
or returns it outside of the loop's frames: those reference the loop, and in the traceback of an error they
would make a cycle that keeps the loop and its memory until the garbage collector comes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

from fastq_loader.scheduling.progress import Progress


class Delivered:
    """There is a batch.

    Attributes:
        batch: it.
        progress: how far the epoch has come with it.
    """

    __slots__ = ("batch", "progress")
    error: ClassVar[None] = None
    fatal: ClassVar[None] = None

    def __init__(self, batch: Any, progress: Progress | None = None) -> None:
        self.batch = batch
        self.progress = progress


class Raised:
    """There is an error at the position of the batch.

    Attributes:
        error: it.
        fatal: why the iteration is over with it; None: the next call goes on.
        progress: how far the epoch has come with it; None: no further than before.
    """

    __slots__ = ("error", "fatal", "progress")

    def __init__(
        self, error: BaseException, fatal: str | None = None, progress: Progress | None = None
    ) -> None:
        self.error = error
        self.fatal = fatal
        self.progress = progress


class Ended:
    """There is no further batch. The error is a class: an instance would gather the tracebacks of all its
    raises."""

    __slots__ = ()
    error: ClassVar[type[BaseException]] = StopIteration
    fatal: ClassVar[None] = None
    progress: ClassVar[None] = None


class Closed:
    """The engine is closing."""

    __slots__ = ()
    fatal: ClassVar[None] = None


#: What an iterator hands to the user.
Outcome = Delivered | Raised | Ended
ENDED, CLOSED = Ended(), Closed()


class OutcomeSlot(Protocol):
    """Where an outcome is put down."""

    outcome: Outcome | None
