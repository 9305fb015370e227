"""Snapshots of the counters, immutable, for users.

Pure. The classes are frozen, so that later counting does not change a snapshot. `counters` counts in
subclasses that are not.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import log2
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # else it would not allow the counters to count
    from dataclasses import dataclass as frozen
else:
    frozen = dataclass(frozen=True)

#: What the wall time of an epoch can be spent on. `EpochStatistics` has the seconds of each.
CAUSES = (
    "consumer",
    "workers",
    "head_of_line",
    "transport",
    "memory",
    "sampler",
    "device_copy",
    "start_up",
)

_PER_OCTAVE = 16


class Histogram:
    """Counts of durations in nanoseconds: percentiles without keeping every value. A value is counted in a
    bucket that is 1/16 of an octave wide, so a percentile is within 3 % of it (half a bucket, 2^(1/32)).
    HdrHistogram does the same with linear buckets."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, nanoseconds: int) -> None:
        """Count one; below 1 counts as 1."""
        bucket = int(_PER_OCTAVE * log2(nanoseconds)) if nanoseconds > 1 else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def include(self, other: Histogram) -> None:
        """Count all that another one has counted."""
        for bucket, count in list(other._counts.items()):
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def percentile(self, percent: float) -> float:
        """The duration in seconds that so many percent of all do not exceed; 0.0 of none."""
        left = percent / 100 * sum(self._counts.values())
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 0.5) / _PER_OCTAVE)) / 1e9
        return 0.0


@dataclass(frozen=True)
class EpochStatistics:
    """Where the wall time of an epoch went, as the consumer saw it, in seconds. The eight causes add up to
    `seconds`.

    Attributes:
        epoch: its number, from 0 on since the loader was made; None: all epochs together.
        batches: handed out, with those that raised.
        seconds: from the call of `iter()` to the end of the epoch, or so far.
        cpu_seconds: CPU time that this process used meanwhile, with all its threads and the training step;
            0.0 where the epoch was broken off, and not the newest.
        consumer_seconds: spent outside of `next()`: the training step.
        workers_seconds: `next()` waited, and the workers were loading; without workers, it loaded.
        head_of_line_seconds: `next()` waited for one batch while later ones were ready, and workers had
            nothing to do or were far ahead.
        transport_seconds: batches were packed for the way to this process, were on the way, and were put
            together again; with all that `next()` itself does.
        memory_seconds: new pages were mapped for batches, or `next()` waited while workers had nothing to do
            because the window was full.
        sampler_seconds: the sampler was asked for indices.
        device_copy_seconds: `next()` began copies to the device, pinned, or waited for the device.
        start_up_seconds: `iter()`, waiting for a worker that was not up, and the end of the workers.
        wait_p50, wait_p95, wait_p99: percentiles of the time that one call of `next()` took, within 3 %.
        ready: how far the workers were ahead: how many batches were loaded and not handed out, on average in
            each of up to 64 equal parts of the epoch, in the order of time.

    >>> loader = DataLoader(range(8), 2)
    >>> batches = list(loader)
    >>> loader.statistics().per_epoch[-1].batches
    4
    """

    epoch: int | None = None
    batches: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    consumer_seconds: float = 0.0
    workers_seconds: float = 0.0
    head_of_line_seconds: float = 0.0
    transport_seconds: float = 0.0
    memory_seconds: float = 0.0
    sampler_seconds: float = 0.0
    device_copy_seconds: float = 0.0
    start_up_seconds: float = 0.0
    wait_p50: float = 0.0
    wait_p95: float = 0.0
    wait_p99: float = 0.0
    ready: tuple[float, ...] = ()

    def spent_on(self, cause: str) -> float:
        """The seconds of one of the causes: of "consumer", "workers", "head_of_line", "transport", "memory",
        "sampler", "device_copy" or "start_up".

        >>> EpochStatistics(seconds=2.0, workers_seconds=1.5).spent_on("workers")
        1.5
        """
        seconds: float = getattr(self, f"{cause}_seconds")
        return seconds


@frozen
class WorkerStatistics:
    """Counts of one worker since it started.

    Attributes:
        id: its number, 0 … num_workers-1.
        pid: process id; of a worker on another machine that there, 0 before it is up.
        restarts: how often its process died and another one took its place.
        batches: answers it gave (batches and errors).
        work_seconds: wall time between receiving a task and answering it, in seconds, summed: busy.
        fetch_seconds: the part of it in which samples were read.
        collate_seconds: the part in which they were made a batch.
        packing_seconds: the part in which the batch was written to shared memory.
        new_memory_seconds: the part in which new pages were mapped; within the two parts before.
        cpu_seconds: CPU time of its process so far.
        idle_seconds: wall time between an answer and the start of the next task, in seconds, summed, but for:
        blocked_seconds: the part of it in which there was no task for it, although the epoch was not over:
            the window was full.
        node: what the other machine is called that it runs on, or ran on last; None: it runs on this one, or
            nowhere yet.
        wire_bytes: bytes of its answers that came over the network, with their headers and before they were
            encrypted; of all processes that had its number. 0 on this machine.
        shared_bytes, private_bytes: memory of its process that others have, too, as what it was forked with
            and batches, and that it has alone. As last seen by `statistics()`, which looks while it runs and
            spends no more than a hundredth of the time on that; 0: never, or it runs on another machine.

    >>> with DataLoader(range(8), 2, num_workers=2) as loader:
    ...     batches = list(loader)
    >>> [worker.batches for worker in loader.statistics().workers]
    [2, 2]
    """

    id: int
    pid: int
    restarts: int = 0
    batches: int = 0
    work_seconds: float = 0.0
    fetch_seconds: float = 0.0
    collate_seconds: float = 0.0
    packing_seconds: float = 0.0
    new_memory_seconds: float = 0.0
    cpu_seconds: float = 0.0
    idle_seconds: float = 0.0
    blocked_seconds: float = 0.0
    node: str | None = None
    wire_bytes: int = 0
    shared_bytes: int = 0
    private_bytes: int = 0


@dataclass(frozen=True)
class LateBatch:
    """A batch that others, which were ready, had to wait for.

    Attributes:
        epoch, batch: their numbers, from 0 on.
        seconds: wall time that `next()` waited for it while others were ready.
        load_seconds: wall time that its worker took for it; 0.0: it has not come.
        sample: the index of the sample that took longest; None where samples are not read one by one, or
            took less than 25 µs each before.
        sample_seconds: wall time of that.

    >>> LateBatch(epoch=0, batch=7, seconds=0.5, load_seconds=0.6, sample=449, sample_seconds=0.58).sample
    449
    """

    epoch: int
    batch: int
    seconds: float
    load_seconds: float = 0.0
    sample: Any = None
    sample_seconds: float = 0.0


@dataclass(frozen=True)
class CacheStatistics:
    """Counts of a cache, in all processes that hold it together; see `cached`.

    Attributes:
        hits: calls whose value was read.
        misses: calls that computed it.
        stored: values that were stored.
        bytes: that they take.
        full: values that were not stored, because there was no room.
        random: values that were not stored, because the function drew from a generator.
        refused: values that were not stored, because they cannot be pickled.
        damaged: values that could not be read, and were computed again.

    >>> square = cached(lambda number: number * number, limit="1MB")
    >>> square(3), square(3)
    (9, 9)
    >>> statistics = square.statistics()
    >>> statistics.hits, statistics.misses, statistics.stored
    (1, 1, 1)
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    bytes: int = 0
    full: int = 0
    random: int = 0
    refused: int = 0
    damaged: int = 0


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read.

    Attributes:
        epoch, batch: their numbers, from 0 on.
        index: its own; None in an iterable dataset.
        instead: the index of the sample that took its place; None: it was left out.
        error: what it raised, as text.

    >>> BadSample(epoch=0, batch=7, index=449, instead=12, error="OSError('truncated')").instead
    12
    """

    epoch: int
    batch: int
    index: Any
    instead: Any
    error: str


@frozen
class StagingStatistics:
    """Counts of copies to the device, since the loader was made unless said otherwise.

    Attributes:
        device: which.
        pin: "register" (blocks are page-locked in place), "bounce" (batches are copied to page-locked buffers
            first) or "pageable"; "" before the first epoch.
        pin_reason: why that.
        pinned_bytes: bytes of host memory that are page-locked now.
        populate_seconds: wall time spent on mapping the pages of blocks before they were locked, in seconds.
        register_seconds: wall time spent on locking pages and making page-locked buffers, in seconds.
        copies, copied_bytes: copies to the device, one for each batch with tensors, and their bytes.
        late_copies: batches handed out before they had arrived: the device's stream waits for them.
        copy_wait_seconds: wall time that `next()` waited for a bounce buffer, in seconds.
        block_wait_seconds: wall time that `next()` waited for copies because the device was behind by twice
            `prefetch` batches, whose blocks cannot be written again before, in seconds.

    >>> DataLoader(range(8)).statistics().staging is None  # its batches stay on the host
    True
    """

    device: str
    pin: str = ""
    pin_reason: str = ""
    pinned_bytes: int = 0
    populate_seconds: float = 0.0
    register_seconds: float = 0.0
    copies: int = 0
    copied_bytes: int = 0
    late_copies: int = 0
    copy_wait_seconds: float = 0.0
    block_wait_seconds: float = 0.0


@frozen
class LoaderStatistics:
    """A snapshot of what a loader did; all counts since the loader was made unless said otherwise.

    Attributes:
        epochs: iterations started.
        batches: batches handed to the user.
        bytes: bytes of tensors and arrays in those batches as they lay in shared memory (0 with
            num_workers=0, which uses none).
        wait_seconds: wall time that `next()` spent waiting for workers, in seconds; with num_workers=0
            the time spent loading.
        total: where the time of all epochs went.
        per_epoch: where the time of each epoch went; of the last hundred, the newest last.
        late_batches: the batches that held up most others, the worst first, ten at most.
        window: batches that may be under way now; of the live pool, or of the last one.
        worker_restarts: workers that died or hung and were replaced.
        rejected_frames: what came over the sockets and was no answer to any task.
        workers: one entry for each worker of the live pool, or of the last one.
        blocks_in_use: blocks of shared memory that are granted, filled or held by users now.
        blocks_free: blocks that are free now.
        blocks_grown: blocks made since the loader was made. A number that keeps growing means that
            batches are being kept, or that their sizes keep growing.
        arena_bytes: bytes of shared memory behind them; those of free blocks that were trimmed do not count.
        stale_answers: answers that came after their epoch had been abandoned, and were dropped.
        staging: copies to the device; None without one.
        wire_bytes: bytes that workers on other machines sent; see `WorkerStatistics`.
        bad_samples: that could not be read, and were left out or replaced; see `errors=`.
        last_bad_samples: of these the last thousand.
        caches: what `cached` has kept for the dataset, one entry for each of its attributes that is one.

    >>> loader = DataLoader(range(8), 2)
    >>> batches = list(loader)
    >>> statistics = loader.statistics()
    >>> statistics.epochs, statistics.batches, statistics.blocks_in_use
    (1, 4, 0)
    """

    epochs: int = 0
    batches: int = 0
    bytes: int = 0
    wait_seconds: float = 0.0
    total: EpochStatistics = EpochStatistics()
    per_epoch: tuple[EpochStatistics, ...] = ()
    late_batches: tuple[LateBatch, ...] = ()
    window: int = 0
    worker_restarts: int = 0
    rejected_frames: int = 0
    workers: tuple[WorkerStatistics, ...] = ()
    blocks_in_use: int = 0
    blocks_free: int = 0
    blocks_grown: int = 0
    arena_bytes: int = 0
    stale_answers: int = 0
    staging: StagingStatistics | None = None
    wire_bytes: int = 0
    bad_samples: int = 0
    last_bad_samples: tuple[BadSample, ...] = ()
    caches: tuple[CacheStatistics, ...] = ()

    @property
    def head_of_line_seconds(self) -> float:
        """The part of `wait_seconds` that was lost to batches that held up others."""
        return self.total.head_of_line_seconds


class Counting:
    """Lets a class count in the fields of a frozen one."""

    __setattr__, __delattr__ = object.__setattr__, object.__delattr__


def values_of(counters: Any) -> dict[str, Any]:
    """The fields of a snapshot, or of what counts in them."""
    return {field.name: getattr(counters, field.name) for field in fields(counters)}
