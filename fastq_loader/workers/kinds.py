"""Arguments about workers: `workers=` is their kind, `num_workers="auto"` their number.

Runs in the consumer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fastq_loader.errors import check_seconds, is_int
from fastq_loader.workers.config import Plan

if TYPE_CHECKING:
    from fastq_loader.workers.worker_pool import WorkerPool


class WorkerKind(ABC):
    """A kind of workers.

    Attributes:
        short_form: the string that stands for this kind as it is made without arguments, if there is one.
        is_remote: whether they take CPUs of other machines.
        max_restarts: workers that may die in an iteration and be replaced; None is the kind's own number.
        grace: seconds for which they outlive a SIGTERM that is not their consumer's.
    """

    short_form: ClassVar[str | None] = None
    is_remote: ClassVar[bool] = False
    max_restarts: int | None

    @property
    def grace(self) -> float:
        return 0.0

    def __post_init__(self) -> None:
        self._check(self.max_restarts)

    def _check(self, restarts: Any) -> None:
        if not is_int(restarts):
            raise TypeError(f"{self}: max_restarts must be a number of workers")
        if restarts < 0:
            raise ValueError(f"{self}: max_restarts must not be negative: use 0 for none")

    def restarts(self, iterable: bool) -> int:
        """How many workers may be replaced, with an iterable dataset or another one. @private"""
        assert self.max_restarts is not None, "it was checked"
        return self.max_restarts

    def missing(self) -> str:
        """Requirements of such workers that this system lacks, and what to install; "" if none. @private"""
        return ""

    @abstractmethod
    def make_pool(self, plan: Plan) -> WorkerPool:
        """A pool of this kind. @private"""


@dataclass(frozen=True)
class Processes(WorkerKind):
    """Worker processes on this machine.

    Args:
        max_restarts: workers that may die in an iteration and be replaced, with a `WorkerReplaced` warning;
            the batches that the dead worker had not answered are loaded again. 0 raises, as torch does. With
            a `timeout`, a worker that has not answered within it is ended and replaced, and the warning shows
            its stacks. A batch at which three workers died raises at its place. When no more workers can be
            replaced, every further `next()` raises: the epoch is not over. With a `RoundRobin` schedule
            order and exactly-once hold, but a new worker's random numbers start anew; an iterable dataset is
            refused, because a new worker would read it from its beginning. Without workers it has no effect.
        grace_seconds: for so long a worker goes on that gets SIGTERM, as all processes of a job do which is
            to end: the training may save a checkpoint, see `preemption`. It ends earlier with its loader, or
            when the training process dies. 0 ends it at once, as in torch.

    Raises:
        TypeError, ValueError: `max_restarts` is not a number of workers, or `grace_seconds` not one of
            seconds.

    >>> Processes(max_restarts=-1)
    Traceback (most recent call last):
    ValueError: Processes(max_restarts=-1): max_restarts must not be negative: use 0 for none
    """

    short_form: ClassVar[str | None] = "processes"
    max_restarts: int = 0
    grace_seconds: float = field(default=60.0, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("grace_seconds", self.grace_seconds)
        if self.grace_seconds > threading.TIMEOUT_MAX:
            raise ValueError(f"grace_seconds={self.grace_seconds} must be from 0, for none, to some days")

    @property
    def grace(self) -> float:
        return self.grace_seconds

    def make_pool(self, plan: Plan) -> WorkerPool:
        from fastq_loader.workers.local_pool import LocalPool  # some systems lack what it is made of

        return LocalPool(plan)


class Auto(int):
    """The number of workers that `num_workers="auto"` has come to. Like any other number to those who compare
    it; the loader chooses another one when an epoch begins. A loader that is made with it goes on from it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"auto ({int(self)})"


def read_workers(workers: Any, kinds: Sequence[type[WorkerKind]] = (Processes,)) -> WorkerKind:
    """Read and check the argument `workers=`.

    Args:
        workers: what the user said.
        kinds: those that have a short form.

    Raises:
        ValueError: it is a string without a meaning.
        TypeError: it is no kind of workers.
    """
    if isinstance(workers, WorkerKind):
        return workers
    for kind in kinds:
        if isinstance(workers, str) and workers == kind.short_form:
            return kind()
    known = " or ".join(f"{kind.short_form!r} or {kind.__name__}(...)" for kind in kinds)
    raise (ValueError if isinstance(workers, str) else TypeError)(
        f"workers={workers!r} is unknown: it is the kind of workers, {known}; how many there are is "
        "num_workers"
    )
