"""Immutable snapshots of the counters, for users.

Pure. The classes are frozen, so that later counting does not change a snapshot. The counters are mutable
subclasses of them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # else mypy would not allow mutable subclasses
    from dataclasses import dataclass as frozen
else:
    frozen = dataclass(frozen=True)

#: Causes among which the wall time of an epoch is divided. `EpochStatistics` has the seconds of each.
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

#: Buckets of a histogram per factor of two.
PER_OCTAVE = 16


class Histogram(dict[int, int]):
    """Counts of durations, for percentiles without storing every value.

    A key is the number of a bucket, `int(PER_OCTAVE * log2(nanoseconds))`. A bucket is 1/16 of an octave
    wide, so a percentile is within 3 % of the value (half a bucket, 2^(1/32)). HdrHistogram does the same
    with linear buckets.
    """

    def include(self, other: Histogram) -> None:
        """Add the counts of another histogram, which may be growing."""
        for bucket, count in dict(other).items():
            self[bucket] += count

    def __missing__(self, bucket: int) -> int:
        return 0

    def percentile(self, percent: float) -> float:
        """The duration in seconds that `percent` percent of all do not exceed; 0.0 without durations."""
        left = percent / 100 * sum(self.values())
        for bucket, count in sorted(self.items()):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 0.5) / PER_OCTAVE)) / 1e9
        return 0.0


@dataclass(frozen=True)
class EpochStatistics:
    """Where the wall time of an epoch went, as the consumer saw it, in seconds. The eight causes add up to
    `seconds`.

    Attributes:
        epoch: its number, from 0 on since the loader was created; None: all epochs together.
        batches: number of batches delivered, errors in their place included.
        seconds: from the call of `iter()` to the end of the epoch, or so far.
        cpu_seconds: CPU time that this process used meanwhile, in all its threads, including the training
            step; 0.0 for an epoch that was broken off and is not the newest.
        consumer_seconds: spent outside of `next()`: the training step.
        workers_seconds: `next()` waited while the workers were loading; without workers, it loaded.
        head_of_line_seconds: `next()` waited for one batch while later ones were ready, and workers were idle
            or far ahead.
        transport_seconds: batches were packed, sent to this process and unpacked; includes the loader's own
            work in `next()`.
        memory_seconds: new pages were mapped for batches, or `next()` waited while workers were idle because
            the window was full.
        sampler_seconds: the sampler drew indices.
        device_copy_seconds: `next()` began copies to the device, pinned memory, or waited for the device.
        start_up_seconds: `iter()`, waiting for a worker that was starting, and the shutdown of the workers.
        wait_p50, wait_p95, wait_p99: percentiles of the seconds that one call of `next()` took, within 3 %.
        ready: how far the workers were ahead: how many batches were loaded and not delivered, on average in
            each of up to 64 equal parts of the epoch, in chronological order.

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
        """The seconds of one of the causes: "consumer", "workers", "head_of_line", "transport", "memory",
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
        pid: process id; for a worker on another machine the process id there, 0 before it has started.
        restarts: how often its process died and was replaced.
        batches: answers it sent (batches and errors).
        work_seconds: wall time between receiving a task and answering it, in seconds, summed: busy.
        fetch_seconds: the part of `work_seconds` in which samples were read.
        collate_seconds: the part in which they were collated.
        packing_seconds: the part in which the batch was written to shared memory.
        new_memory_seconds: the part in which new pages were mapped; within the two previous parts.
        cpu_seconds: CPU time of its process so far.
        idle_seconds: wall time between an answer and the start of the next task, in seconds, summed, without
            `blocked_seconds`.
        blocked_seconds: wall time in which there was no task for it although the epoch was not over, because
            the window was full.
        node: name of the other machine on which it runs, or ran last; None: it runs on this one, or has not
            started.
        wire_bytes: bytes of its answers received over the network, with headers and before encryption; of all
            processes that had its number. 0 on this machine.
        shared_bytes, private_bytes: memory that its process shares (inherited by fork, and batches), and
            memory of its own. Measured by `statistics()` while it runs, in at most a hundredth of the time;
            0: not measured, or on another machine.

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
    """A batch that held up others which were ready.

    Attributes:
        epoch, batch: their numbers, from 0 on.
        seconds: wall time that `next()` waited for it while others were ready.
        load_seconds: wall time that its worker took for it; 0.0: it has not arrived.
        sample: the index of the sample that took longest; None if samples are not read one by one, or took
            less than 25 µs each in the worker's previous batch.
        sample_seconds: wall time of that sample.

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
    """Counts of a cache, over all processes that share it; see `cached`.

    Attributes:
        hits: calls whose value was read from the cache.
        misses: calls that computed their value.
        stored: values that were stored.
        bytes: size of the stored values; with `path=`, of the file, which LMDB fills page by page.
        full: values that were not stored, because there was no room.
        busy: values that were not stored this time: another process was storing the same, or was stopped
            while it stored, or another thread drew from a global generator meanwhile.
        random: values that were not stored, because the function drew from a generator.
        refused: values that were not stored, because they cannot be pickled.
        damaged: values that could not be read, and were computed again.
        function: module and name of the function.
        values: number of values in the cache.
        limit: largest value of `bytes`.

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
    busy: int = 0
    random: int = 0
    refused: int = 0
    damaged: int = 0
    function: str = ""
    values: int = 0
    limit: int = 0


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read.

    Attributes:
        epoch, batch: their numbers, from 0 on.
        index: its index; None in an iterable dataset.
        instead: the index of the sample that took its place; None: it was left out.
        error: the exception, as text.

    >>> BadSample(epoch=0, batch=7, index=449, instead=12, error="OSError: truncated").instead
    12
    """

    epoch: int
    batch: int
    index: Any
    instead: Any
    error: str


@frozen
class StagingStatistics:
    """Counts of copies to the device, since the loader was created unless stated otherwise.

    Attributes:
        device: name of the device.
        pin: "register" (blocks are page-locked in place), "bounce" (without workers: batches are copied to
            page-locked buffers first) or "pageable" (where neither works); "" before the first epoch.
        pin_reason: why.
        pinned_bytes: bytes of host memory that are page-locked now.
        populate_seconds: wall time spent on mapping the pages of blocks before they were locked, in seconds.
        register_seconds: wall time spent on locking pages and making page-locked buffers, in seconds.
        copies, copied_bytes: copies to the device, one for each batch with tensors, and their bytes.
        late_copies: batches delivered before their copies had ended: the device's stream waits for them.
        copy_wait_seconds: wall time that `next()` waited for a bounce buffer, in seconds.
        block_wait_seconds: wall time that `next()` waited for copies because the device was behind by twice
            `prefetch` batches, whose blocks are still in use, in seconds.

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
    """A snapshot of a loader's counters; all counts since the loader was created unless stated otherwise.

    Attributes:
        epochs: iterations started.
        batches: batches delivered to the user.
        bytes: bytes of tensors and arrays in these batches as stored in shared memory (0 with num_workers=0,
            which uses none).
        wait_seconds: wall time that `next()` spent waiting for workers, in seconds; with num_workers=0
            the time spent loading.
        total: where the time of all epochs went.
        per_epoch: where the time of each epoch went; of the last hundred, the newest last.
        late_batches: the batches that held up most others, the worst first, ten at most.
        window: batches that may be in flight now; of the live pool, or of the last one.
        worker_restarts: workers that died or hung and were replaced.
        rejected_frames: frames received over the sockets that did not answer any task.
        workers: one entry for each worker of the live pool, or of the last one.
        blocks_in_use: blocks of shared memory that are granted, filled or referenced by users now.
        blocks_free: blocks that are free now.
        blocks_grown: blocks created since the loader was created. A number that keeps growing means that
            batches are never released, or that their sizes keep growing.
        arena_bytes: bytes of shared memory of all blocks, without free blocks that were trimmed.
        stale_answers: answers that arrived after their epoch had been abandoned, and were dropped.
        staging: copies to the device; None without a device.
        wire_bytes: bytes that workers on other machines sent; see `WorkerStatistics`.
        bad_samples: samples that could not be read, and were left out or replaced; see `errors=`.
        last_bad_samples: the last thousand of these.
        caches: one entry for each `cached` function among the attributes of the dataset.

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
        """The part of `wait_seconds` spent on batches that held up others."""
        return self.total.head_of_line_seconds


class MutableFields:
    """Makes a subclass of a frozen class mutable, so that it can count in its fields."""

    __setattr__, __delattr__ = object.__setattr__, object.__delattr__


def values_of(counters: Any) -> dict[str, Any]:
    """The fields of a snapshot or of its counters, by name."""
    return {field.name: getattr(counters, field.name) for field in fields(counters)}
