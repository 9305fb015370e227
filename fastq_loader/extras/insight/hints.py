"""Issues the hints that `extras.insight.advice` finds, each kind at most once per loader.

Runs in the consumer, on the thread that calls `next()`. A user's warning filter may turn a hint into an
error. So iterators call this module when no batch can be lost: before they request the next batch, and at the
end of the epoch, with the outcome stored for the next call.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastq_loader.api import (
    KEPT,
    Auto,
    DuplicateData,
    IdleWorker,
    LoaderHint,
    MemoryPressure,
    PrivateGenerators,
    SameOrder,
    TinyBatches,
    resources,
    warn_user,
)
from fastq_loader.extras.insight import advice
from fastq_loader.extras.insight.machine import memory_bytes

if TYPE_CHECKING:
    from fastq_loader.api import EpochLog, EpochRecord, Loader

_NEVER = sys.maxsize
#: Number of batches after which each kind is checked, besides at the end of the epoch. `DuplicateData` is
#: checked early for endless streams, but not before 1,000: workers repeat each other in torch's own tests, in
#: which no `next()` may warn.
_MOMENTS = {MemoryPressure: 4, SameOrder: KEPT, PrivateGenerators: 32, DuplicateData: 1000}


class Hints:
    """Hints of one epoch.

    Args:
        loader: the loader.
        previous: the record of the previous epoch, or None.
        record, log: the record and the log of this epoch.

    Attributes:
        due: number of batches after which `look` must be called.
    """

    def __init__(
        self, loader: Loader, previous: EpochRecord | None, record: EpochRecord, log: EpochLog
    ) -> None:
        self._resources = resources.of(loader)
        self._dataset, self._workers = type(loader.dataset).__name__, loader.num_workers
        self._log = log
        self._order = record.order
        self._previous = previous
        kinds: set[type[LoaderHint]] = set()
        # Users who only look at some batches before the first epoch need not call `set_epoch`.
        enough = previous is not None and (previous.over or previous.progress.delivered >= KEPT)
        if enough and record.order.first is not None:
            kinds.add(SameOrder)
        if loader.num_workers and record.saved is None:  # else the epoch is incomplete
            kinds |= {MemoryPressure, TinyBatches, DuplicateData, IdleWorker, PrivateGenerators}
        if isinstance(loader.num_workers, Auto):  # it reduces them by itself
            kinds.discard(TinyBatches)
        self._kinds = kinds - self._resources.hinted
        moments = ((at, kind) for kind, at in _MOMENTS.items() if kind in self._kinds)
        self._moments = sorted(moments, key=lambda moment: moment[0])
        self.due = self._moments[0][0] if self._moments else _NEVER

    def look(self) -> None:
        """Check for the hint that is due, after `due` batches."""
        kind = self._moments.pop(0)[1]
        self.due = self._moments[0][0] if self._moments else _NEVER
        self._judge(kind)

    def look_back(self) -> None:
        """Check for the remaining hints at the end of the epoch. A second call does nothing."""
        kinds, self._kinds, self.due = self._kinds - {MemoryPressure}, set(), _NEVER
        for kind in sorted(kinds, key=lambda kind: kind.__name__):
            self._judge(kind)
        self._previous = None

    def _judge(self, kind: type[LoaderHint]) -> None:
        text = None if kind in self._resources.hinted else _JUDGES[kind](self)  # by another one
        if text is not None:
            self._resources.hinted.add(kind)
            warn_user(text, kind)

    def _same_order(self) -> str | None:
        order, previous = self._order, self._previous
        if order.first is None or previous is None or previous.order.first is None:
            return None
        if previous.order.start.epochs != order.start.epochs:
            return None
        samples = order.first.repeats(previous.order.first)
        return advice.same_order(order.first.sampler, self._log.epoch, samples)

    def _tiny_batches(self) -> str | None:
        if self._order.progress.delivered < advice.LEAST_BATCHES:  # counting takes time
            return None
        return advice.tiny_batches(self._log.counted(), self._workers)

    def _memory_pressure(self) -> str | None:
        self._resources.hinted.add(MemoryPressure)  # checked once, because it reads files
        counters = self._resources.counters
        held = sum(engine.blocks()[2] for engine in list(self._resources.engines))
        return advice.memory_pressure(counters.window, counters.batch_bytes, memory_bytes() + held)


_JUDGES: dict[type[LoaderHint], Callable[[Hints], str | None]] = {
    SameOrder: Hints._same_order,
    MemoryPressure: Hints._memory_pressure,
    DuplicateData: lambda of: advice.duplicate_data(of._dataset, of._log.first_batches),
    IdleWorker: lambda of: advice.idle_workers(of._dataset, of._log.first_batches, of._workers),
    TinyBatches: Hints._tiny_batches,
    PrivateGenerators: lambda of: advice.private_generators(of._log.drawn_from),
}
