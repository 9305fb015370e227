"""The arguments about workers: their kind (`workers=`) and number (`num_workers="auto"`).

Runs in the consumer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fastq_loader.errors import check_seconds, is_int
from fastq_loader.workers.config import Plan

if TYPE_CHECKING:
    from fastq_loader.workers.worker_pool import WorkerPool


#: Kinds of workers by their short forms. Kinds of other packages join when they are defined.
_KINDS: dict[str, type[WorkerKind]] = {}


class WorkerKind(ABC):
    """Base class of the kinds of workers.

    Attributes:
        short_form: the string that stands for this kind without arguments; None if there is no such string.
        is_remote: whether the workers use CPUs of other machines.
        max_restarts: number of dead workers that may be replaced in an iteration; None: the kind's default.
    """

    short_form: ClassVar[str | None] = None
    is_remote: ClassVar[bool] = False
    max_restarts: int | None

    def __init_subclass__(cls) -> None:
        if short_form := vars(cls).get("short_form"):
            _KINDS[short_form] = cls

    def __post_init__(self) -> None:
        self._check(self.max_restarts)

    def _check(self, restarts: Any) -> None:
        if not is_int(restarts):
            raise TypeError(f"{self}: max_restarts must be a number of workers")
        if restarts < 0:
            raise ValueError(f"{self}: max_restarts must not be negative: use 0 for none")

    def restarts(self, iterable: bool) -> int:
        """Number of workers that may be replaced, for an iterable dataset or another one. @private"""
        assert self.max_restarts is not None, "it was checked"
        return self.max_restarts

    def missing(self) -> str:
        """Requirements that this system lacks, and the packages to install; "" if it lacks none. @private"""
        return ""

    @abstractmethod
    def make_pool(self, plan: Plan) -> WorkerPool:
        """Make a pool of this kind. @private"""


@dataclass(frozen=True)
class Processes(WorkerKind):
    """Worker processes on this machine.

    Args:
        max_restarts: number of dead workers that may be replaced in an iteration. Each replacement emits a
            `WorkerReplaced` warning; the batches that the dead worker had not answered are loaded again. With
            0 a death raises, as in torch. With a `timeout`, a worker that does not answer within it is ended
            and replaced, and the warning shows its stacks. A batch at which three workers died raises at its
            position. When no more workers can be replaced, every further `next()` raises: the epoch is not
            over. With a `RoundRobin` schedule, batches still come in order and exactly once, but a new
            worker's random numbers start anew; an iterable dataset is refused, because a new worker would
            read it from its beginning. Under the start method fork, workers are then forked from a copy of
            this process: it is their `os.getppid()`, and a library that asks for that, to refuse to work in a
            child of a process that has used it, works, or hangs (numba with GNU OpenMP). Without workers it
            has no effect.
        grace_seconds: seconds for which a worker outlives SIGTERM, which all processes of a job get when the
            job is to end, and SIGINT. Meanwhile the training may save a checkpoint; `preemption` asks for
            this time by itself. The worker ends earlier with its loader, or when the training process dies.
            0 ends it at once, as in torch.

    Raises:
        TypeError, ValueError: `max_restarts` is not a number of workers, or `grace_seconds` is not a number
            of seconds.

    >>> Processes(max_restarts=-1)
    Traceback (most recent call last):
    ValueError: Processes(max_restarts=-1): max_restarts must not be negative: use 0 for none
    """

    short_form: ClassVar[str | None] = "processes"
    max_restarts: int = 0
    grace_seconds: float = field(default=0.0, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seconds("grace_seconds", self.grace_seconds)
        if self.grace_seconds > threading.TIMEOUT_MAX:
            raise ValueError(f"grace_seconds={self.grace_seconds} must be at most threading.TIMEOUT_MAX")

    def make_pool(self, plan: Plan) -> WorkerPool:
        from fastq_loader.workers.local_pool import LocalPool  # some systems lack its modules

        return LocalPool(plan)


class Auto(int):
    """The number of workers that `num_workers="auto"` has chosen. It compares like any other int. The loader
    may choose another number when an epoch begins; a loader that is made with an `Auto` starts from it."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"auto ({int(self)})"


def read_workers(workers: Any) -> WorkerKind:
    """Check the argument `workers=`, and return the kind of workers.

    Args:
        workers: the argument: a kind of workers, or its short form.

    Raises:
        ValueError: the argument is an unknown string.
        TypeError: the argument is neither a kind of workers nor a string.
    """
    if isinstance(workers, WorkerKind):
        return workers
    if isinstance(workers, str) and workers in _KINDS:
        return _KINDS[workers]()
    known = " or ".join(f"{short_form!r} or {kind.__name__}(...)" for short_form, kind in _KINDS.items())
    raise (ValueError if isinstance(workers, str) else TypeError)(
        f"workers={workers!r} is unknown: use a kind of workers, {known}; the number of workers is "
        "num_workers"
    )
