"""Outcomes of `next()`: a batch, an error, or the end.

Pure. An outcome is stored in a slot of its iterator. When the call that made it has returned, the iterator
takes it from there, and returns the batch or raises the error. So the traceback of an error has no frame that
references the event loop: the two would keep each other alive, and with them the memory of the pool, until
the garbage collector runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from fastq_loader.errors import locate
from fastq_loader.ipc.messages import decode_index
from fastq_loader.scheduling.progress import Progress

#: The progress of an epoch after an outcome; or by how many positions it moves on, where batches are
#: delivered one after the other and nothing else is recorded.
Moved = Progress | int


@dataclass(slots=True, eq=False)
class Delivered:
    """A batch to return, and the progress of the epoch after it, see `Moved`."""

    batch: Any
    progress: Moved
    error: ClassVar[None] = None
    fatal: ClassVar[None] = None


@dataclass(slots=True, eq=False)
class Raised:
    """An error to raise.

    Attributes:
        error: the exception.
        progress: progress of the epoch after it, see `Moved`.
        fatal: why the iteration is over with the error; None if the next call continues.
    """

    error: BaseException
    progress: Moved
    fatal: str | None = None

    def at(self, seq: int, index: Any, worker: int | None) -> Raised:
        """Give the error the position of its batch, without overwriting attributes of its own."""
        locate(self.error, index=decode_index(index), batch=seq, worker=worker)
        return self


@dataclass(slots=True, eq=False)
class Ended:
    """There is no further batch.

    Attributes:
        error: the StopIteration to raise. An instance would collect the tracebacks of all its raises.
    """

    error: StopIteration | type[StopIteration] = StopIteration
    fatal: ClassVar[None] = None


Outcome = Delivered | Raised | Ended

#: The end, made without a call.
ENDED = Ended()


class OutcomeSlot(Protocol):
    """Receives an outcome; iterators implement it."""

    outcome: Outcome | None
