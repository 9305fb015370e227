"""How a call of `next()` has ended, as a value.

Runs in the consumer. The event loop puts an outcome down where the iterator finds it, and the iterator raises
or returns it outside of the loop's frames: those reference the loop, and in the traceback of an error they
would make a cycle that keeps the loop and its memory until the garbage collector comes.
"""

from __future__ import annotations

from typing import Any, ClassVar, Protocol


class Delivered:
    """There is a batch."""

    __slots__ = ("batch",)
    error: ClassVar[None] = None
    fatal: ClassVar[None] = None

    def __init__(self, batch: Any) -> None:
        self.batch = batch


class Raised:
    """There is an error at the position of the batch.

    Attributes:
        error: it.
        fatal: why the iteration is over with it; None: the next call goes on.
    """

    __slots__ = ("error", "fatal")

    def __init__(self, error: BaseException, fatal: str | None = None) -> None:
        self.error = error
        self.fatal = fatal


class Ended:
    """There is no further batch. The error is a class: an instance would gather the tracebacks of all its
    raises."""

    __slots__ = ()
    error: ClassVar[type[BaseException]] = StopIteration
    fatal: ClassVar[None] = None


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
