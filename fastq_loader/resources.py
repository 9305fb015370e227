"""Per-loader runtime state besides the arguments: counters, pools of workers, and its way to a device.

Runs in the consumer. Made when a loader first needs it, because frameworks make loaders without running the
constructor.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from fastq_loader.consumer.bad_samples import BadSamples
from fastq_loader.consumer.engine import Engine
from fastq_loader.device.staging import DeviceSession, SerialStaging
from fastq_loader.errors import LoaderHint
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

    def close_engines(self, reason: str) -> None:
        """End all workers of the loader; wait for those that are in the middle of a sample."""
        for engine in list(self.engines):
            engine.close(reason)
        stopping.wait(self.counters)
