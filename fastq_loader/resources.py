"""Per-loader runtime state besides the arguments: counters, pools of workers, and its way to a device.

Runs in the consumer. Made when a loader first needs it, because frameworks make loaders without running the
constructor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from fastq_loader.consumer.bad_samples import BadSamples
from fastq_loader.consumer.engine import Engine
from fastq_loader.device.staging import DeviceSession, SerialStaging
from fastq_loader.errors import IteratorInvalid, LoaderHint
from fastq_loader.insight.auto import Chooser
from fastq_loader.resume.record import EpochRecord, Saved
from fastq_loader.statistics.counters import Counters
from fastq_loader.workers import stopping

#: Epochs whose batches can be loaded again.
_REMEMBERED = 16


class Resources:
    """Runtime state of one loader; of it only `saved` is copied or pickled with the arguments.

    Args:
        owner: the loader; None until it asks for them.
        saved: see below.

    Attributes:
        counters: of everything that it did.
        engines: the pools of workers that its iterators use.
        torchs: torch's own iterators, where ours cannot run.
        session: its way to a device, once an iteration has begun, or None.
        idle: the staging of iterations without workers that are over, to be used again.
        place: of the newest epoch the record, or None, and what the next one goes on from, or None; as one
            immutable record, which other threads can read.
        held: gives the state of before, while an epoch is being begun; else None.
        shared: states of shared generators that the first epoch begins from, because a state says so.
        hinted: what the user was told of, and is not told again.
        chooser: of `num_workers="auto"`: how many workers the next epoch gets.
        bad_samples: that could not be read.
        begun: the records of the last epochs, the newest last.
        kept: what its pools use again, see `Plan`.
    """

    def __init__(self, owner: object | None = None, saved: Saved | None = None) -> None:
        self.owner: Callable[[], Any] = (lambda: None) if owner is None else weakref.ref(owner)
        self.counters = Counters()
        self.engines: weakref.WeakSet[Engine] = weakref.WeakSet()
        self.torchs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.session: DeviceSession | None = None
        self.idle: list[SerialStaging] = []
        self.place: tuple[EpochRecord | None, Saved | None] = None, saved
        self.held: Callable[[], dict[str, Any]] | None = None
        self.shared: dict[str, Any] = {}
        self.hinted: set[type[LoaderHint]] = set()
        self.chooser = Chooser()
        self.bad_samples = BadSamples({} if saved is None else saved.bad_samples)
        self.kept: dict[str, Any] = {}
        self.begun: deque[EpochRecord] = deque(maxlen=_REMEMBERED)

    @property
    def record(self) -> EpochRecord | None:
        return self.place[0]

    @property
    def saved(self) -> Saved | None:
        return self.place[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Resources, (None, self.saved)  # no loader's: a subclass copied all attributes

    def add_torchs(self, iterator: Any) -> Any:
        """Take note of torch's own iterator, of whose epochs there are no records."""
        self.place = None, None
        self.torchs.add(iterator)
        return iterator

    def pools(self) -> int:
        """How many iterators have workers."""
        ours = sum(engine.closed is None for engine in list(self.engines))
        return ours + sum(not iterator._shutdown for iterator in list(self.torchs))

    def close_engines(self, reason: str) -> None:
        """End all workers of the loader; wait for those that are in the middle of a sample."""
        for engine in list(self.engines):
            engine.close(reason)
        while self.torchs:
            iterator = self.torchs.pop()
            if not iterator._shutdown:  # else it is over, and goes on to say so
                iterator._next_data = partial(_refuse, reason)  # torch would end the epoch
                iterator._shutdown_workers()
        stopping.wait(self.counters)

    def close(self, reason: str) -> None:
        """The same, and let go of what iterations without workers have kept."""
        self.close_engines(reason)
        while self.idle:
            self.idle.pop().close()


def _refuse(reason: str) -> NoReturn:
    raise IteratorInvalid(f"this iterator cannot go on: {reason}")
