"""Hints that users get without asking, each kind at most once per loader.

Runs in the consumer, on the thread that calls `next()`. A user's warning filter may turn a hint into an
error. So iterators call this module when no batch can be lost: before they request the next batch, and at the
end of the epoch, with the outcome stored for the next call.

The functions below derive the text of a hint from observations, or return None. They rather miss a problem
than raise a false alarm, which breaks runs in which warnings are errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

from fastq_loader import options
from fastq_loader.epoch import resources
from fastq_loader.errors import (
    DuplicateData,
    IdleWorker,
    LoaderHint,
    MemoryPressure,
    PinnedCopies,
    PrivateGenerators,
    SameOrder,
    TinyBatches,
    warn_user,
)
from fastq_loader.extras.insight.advice import advice
from fastq_loader.extras.insight.causes import Breakdown, breakdown, cpu_share, table
from fastq_loader.extras.insight.facts import of_arguments
from fastq_loader.extras.insight.machine import cpus, memory_bytes
from fastq_loader.extras.insight.model import RunProfile, Setting, costs_of, seconds_per_batch
from fastq_loader.statistics.counters import FIRST_BATCHES
from fastq_loader.workers.kinds import Auto

if TYPE_CHECKING:
    from fastq_loader.epoch.epoch import Epoch
    from fastq_loader.options import Loader
    from fastq_loader.statistics.counters import EpochLog

#: The first batches of each worker: a digest of the data, and their size in bytes.
FirstBatches = Mapping[int, Sequence[tuple[bytes, int]]]

_NEVER = sys.maxsize
#: Number of batches after which each kind is checked, besides at the end of the epoch. `DuplicateData` is
#: checked early for endless streams, but not before 1,000: workers repeat each other in torch's own tests, in
#: which no `next()` may warn.
_MOMENTS = {SameOrder: 0, MemoryPressure: 4, PrivateGenerators: 32, DuplicateData: 1000}
#: An epoch with fewer batches was a look at the data, before which nobody calls `set_epoch`.
_LEAST_SHUFFLED = 32
#: This many bytes of data agree by chance as seldom: three numbers.
_LEAST_BYTES = 24
#: Minimum number of different batches of a worker, if it has that many: repetitive data prove nothing.
_LEAST_DIFFERENT = 3
#: Minimum batches of an epoch, and seconds lost in it, for a hint.
_LEAST_BATCHES, _LEAST_SECONDS = 1000, 5.0
#: Minimum factor by which the epoch would have to be faster.
_LEAST_TIMES = 2
#: Minimum seconds of an epoch in which batches are copied to page-locked memory.
_LEAST_PINNING = 1.0
#: Bytes of a window; a smaller one is not the cause of full memory.
_LEAST_WINDOW = 64 << 20


class Hints:
    """Hints of one epoch.

    Args:
        loader: the loader.
        begun: the records of the last epochs before this one.
        record, log: the record and the log of this epoch.

    Attributes:
        due: number of batches after which `look` must be called.
    """

    def __init__(self, loader: Loader, begun: Iterable[Epoch], record: Epoch, log: EpochLog) -> None:
        self._resources = resources.of(loader)
        self._dataset, self._workers = type(loader.dataset).__name__, loader.num_workers
        self._log = log
        self._order = record
        kinds: set[type[LoaderHint]] = set()
        self._same = [
            other.start.epoch
            for other in begun
            if record.info.wants_epochs
            and other.start.epochs == record.start.epochs
            and other.progress.delivered >= _LEAST_SHUFFLED
            and record.saved is other.saved is None
        ]
        if self._same:
            kinds.add(SameOrder)
        if loader.num_workers and record.saved is None:  # else the epoch is incomplete
            kinds |= {MemoryPressure, TinyBatches, DuplicateData, IdleWorker, PrivateGenerators}
        if loader.pin_memory and options.of(loader).device is None:
            kinds.add(PinnedCopies)
            self._arguments = of_arguments(loader)
        if isinstance(loader.num_workers, Auto):  # it reduces them by itself
            kinds.discard(TinyBatches)
        self._kinds = kinds - self._resources.hinted
        moments = ((at, kind) for kind, at in _MOMENTS.items() if kind in self._kinds)
        self._moments = [*sorted(moments, key=lambda moment: moment[0]), (_NEVER, LoaderHint)]
        self.due = self._moments[0][0]

    def look(self) -> None:
        """Check for the hint that is due, after `due` batches."""
        kind = self._moments.pop(0)[1]
        self.due = self._moments[0][0]
        self._judge(kind)

    def look_back(self) -> None:
        """Check for the remaining hints at the end of the epoch. A second call does nothing."""
        kinds, self._kinds, self.due = self._kinds - {MemoryPressure}, set(), _NEVER
        for kind in sorted(kinds, key=lambda kind: kind.__name__):
            self._judge(kind)

    def _judge(self, kind: type[LoaderHint]) -> None:
        text = None if kind in self._resources.hinted else _JUDGES[kind](self)  # by another one
        if text is not None:
            self._resources.hinted.add(kind)
            warn_user(text, kind)

    def _same_order(self) -> str | None:
        order = self._order
        return (
            f"{order.info.wants_epochs} gives the same order in epochs {self._same[-1]} and "
            f"{order.start.epoch}: call its set_epoch(epoch) before each epoch"
        )

    def _private_generators(self) -> str | None:
        if not (names := ", ".join(sorted(self._log.private_generators))):
            return None
        return (
            f"{names}: each worker has its own copy of such a generator. With schedule='dynamic' the random "
            "numbers that a batch draws from it depend on the worker that loads the batch. Draw from the "
            "global generator of torch, Python or numpy, which is seeded for each batch"
        )

    def _tiny_batches(self) -> str | None:
        if self._order.progress.delivered < _LEAST_BATCHES:  # counting takes time
            return None
        return tiny_batches(self._broken_down(), self._workers)

    def _pinned_copies(self) -> str | None:
        if self._log.totals().next_seconds < _LEAST_PINNING:
            return None
        epoch, counters = self._broken_down(), self._resources.counters
        if epoch.epoch.device_copy_seconds < _LEAST_PINNING:
            return None
        costs = costs_of(epoch, cpu_share(counters) if self._workers else None)
        setting, loader = self._arguments
        setting = replace(setting, num_workers=len(counters.workers) if self._workers else 0)
        run = RunProfile(epoch.epoch, costs, setting, cpus(), loader=loader)
        return next(iter(advice(run, ["device_copy"])), None)

    def _broken_down(self) -> Breakdown:
        return breakdown(self._log, table(self._resources.counters))

    def _memory_pressure(self) -> str | None:
        self._resources.hinted.add(MemoryPressure)  # checked once, because it reads files
        counters = self._resources.counters
        held = sum(pool.blocks()[2] for pool in list(self._resources.pools))
        return memory_pressure(counters.window, counters.batch_bytes, memory_bytes() + held)


# ---- texts ----------------------------------------------------------------------------------------


def duplicate_data(dataset: str, first: FirstBatches) -> str | None:
    """Hint: two workers of an iterable dataset began with the same batches."""
    for one, other in combinations(sorted(first), 2):
        batches = first[one]
        different = len({digest for digest, _ in batches})
        if (
            batches == first[other]
            and different >= min(_LEAST_DIFFERENT, max(2, len(batches)))
            and sum(nbytes for _, nbytes in batches) >= _LEAST_BYTES
        ):
            return (
                f"Workers {one} and {other} gave the same data (their first {len(batches)} batches were "
                f"compared), so every sample of {dataset} comes more than once: let its __iter__ yield only "
                "the part of torch.utils.data.get_worker_info().id, one of .num_workers"
            )
    return None


def idle_workers(dataset: str, first: FirstBatches, workers: int) -> str | None:
    """Hint: some workers of an iterable dataset loaded no batch in an epoch that is over."""
    # If the others loaded few batches, an idle worker may be an accident of a small dataset.
    idle = [worker for worker in range(workers) if not first.get(worker)]
    if not 0 < len(idle) < workers or min(map(len, first.values())) < FIRST_BATCHES:
        return None
    busy = workers - len(idle)
    return (
        f"{len(idle)} of {workers} workers gave no batch in a whole epoch (worker "
        f"{', '.join(map(str, idle))}): {dataset} has data for {busy}. Use num_workers={busy}, or divide it "
        "into more parts"
    )


def tiny_batches(epoch: Breakdown, workers: int) -> str | None:
    """Hint: an epoch that is over, with `workers` workers, would have been faster without them."""
    batches, costs = epoch.epoch.batches, costs_of(epoch, None)
    if batches < _LEAST_BATCHES or costs is None:
        return None
    alone = seconds_per_batch(costs, Setting(0), 1.0)
    took = (epoch.seconds - epoch.epoch.start_up_seconds) / epoch.epoch.recorded_batches
    if took < _LEAST_TIMES * alone or (took - alone) * batches < _LEAST_SECONDS:
        return None
    of = f"{workers} worker{'s' * (workers > 1)}"
    return (
        f"A batch takes {costs.load * 1e6:.0f} µs to load, and {took * 1e6:.0f} µs with its way from {of} "
        f"and the step: with num_workers=0 this epoch of {batches} batches would have taken about "
        f"{alone * batches:.1f} s in place of {took * batches:.1f} s. Use that, or larger batches"
    )


def memory_pressure(window: int, batch_bytes: float, left: int) -> str | None:
    """Hint: `window` batches of `batch_bytes` bytes, loaded ahead, take over half of the `left` bytes."""
    needed = window * batch_bytes
    if needed < _LEAST_WINDOW or needed <= left / 2:
        return None
    return (
        f"{window} batches of {batch_bytes / 1e6:,.1f} MB may be loaded ahead: {needed / 1e6:,.0f} MB, more "
        f"than half of the {left / 1e6:,.0f} MB that this process can have. Use a smaller prefetch_factor or "
        "batch_size, or fewer workers, before the system ends one of them"
    )


_JUDGES: dict[type[LoaderHint], Callable[[Hints], str | None]] = {
    SameOrder: Hints._same_order,
    MemoryPressure: Hints._memory_pressure,
    DuplicateData: lambda of: duplicate_data(of._dataset, of._log.first_batches),
    IdleWorker: lambda of: idle_workers(of._dataset, of._log.first_batches, of._workers),
    TinyBatches: Hints._tiny_batches,
    PinnedCopies: Hints._pinned_copies,
    PrivateGenerators: Hints._private_generators,
}
