"""Immutable snapshots of the counters, for users.

Pure. The classes are frozen, so that later counting does not change a snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

from fastq_loader.statistics.snapshots import BadSample, StagingStatistics

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


@dataclass(frozen=True)
class EpochStatistics:
    """Where the wall time of an epoch went, as the consumer saw it, in seconds.

    Counts are exact. The eight causes, which add up to `seconds`, and the percentiles are found in the
    records of the loader's last 16,384 calls. Of an epoch whose first records were overwritten they are those
    of its last `recorded_batches` batches.

    Attributes:
        epoch: its number, from 0 on since the loader was created; None: all epochs together.
        batches: number of batches delivered, errors in their place included.
        samples: the samples of these batches as the sampler asked for them: with bad ones, and with those for
            which a stream had no data left.
        bad_samples: samples that could not be read; see `errors=`.
        seconds: from the call of `iter()` to the end of the epoch, or so far.
        next_seconds: the part inside of `next()`.
        wait_seconds: the part of that in which it waited for workers; without workers, it loaded.
        late_batches: batches that held up others which were ready.
        bytes: bytes of its batches in shared memory.
        cpu_seconds: CPU time that this process used meanwhile, in all its threads, including the training
            step; 0.0 for an epoch that was broken off and is not the newest.
        recorded_batches: the batches of which there are records.
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
        wait_p50, wait_p95, wait_p99: percentiles of the seconds that one call of `next()` took.

    >>> loader = DataLoader(range(8), 2)
    >>> batches = list(loader)
    >>> loader.statistics().per_epoch[-1].batches
    4
    """

    epoch: int | None = None
    batches: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    samples: int = 0
    bad_samples: int = 0
    next_seconds: float = 0.0
    wait_seconds: float = 0.0
    late_batches: int = 0
    bytes: int = 0
    recorded_batches: int = 0
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

    @property
    def waiting_share(self) -> float:
        """The part of `seconds` in which the training loop waited inside of `next()`, from 0 to 1."""
        return self.next_seconds / self.seconds if self.seconds else 0.0

    @property
    def batches_per_second(self) -> float:
        return self.batches / self.seconds if self.seconds else 0.0

    def spent_on(self, cause: str) -> float:
        """The seconds of one of the causes: "consumer", "workers", "head_of_line", "transport", "memory",
        "sampler", "device_copy" or "start_up".

        >>> EpochStatistics(seconds=2.0, workers_seconds=1.5).spent_on("workers")
        1.5
        """
        seconds: float = getattr(self, f"{cause}_seconds")
        return seconds


@dataclass(frozen=True)
class WorkerStatistics:
    """Counts of one worker, from the records of the batches that it loaded since it started; the loader has
    records of its last 16,384 calls.

    Attributes:
        id: its number, 0 … num_workers-1.
        pid: process id; for a worker on another machine the process id there, 0 before it has started.
        restarts: how often its process died and was replaced.
        batches: its batches that were delivered, errors in their place included.
        work_seconds: wall time between receiving a task and answering it, in seconds, summed: busy.
        fetch_seconds: the part of `work_seconds` in which samples were read.
        collate_seconds: the part in which they were collated.
        packing_seconds: the part in which the batch was written to shared memory.
        new_memory_seconds: the part in which new pages were mapped; within the two previous parts.
        idle_seconds: wall time between an answer and the start of the next task, in seconds, summed, without
            `blocked_seconds`.
        blocked_seconds: wall time in which there was no task for it although the epoch was not over, because
            the window was full.
        node: name of the other machine on which it runs, or ran last; None: it runs on this one, or has not
            started.
        wire_bytes: bytes of its answers received over the network, with headers and before encryption; of all
            processes that had its number. 0 on this machine.

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
    idle_seconds: float = 0.0
    blocked_seconds: float = 0.0
    node: str | None = None
    wire_bytes: int = 0


@dataclass(frozen=True)
class LateBatch:
    """A batch that held up others which were ready.

    Attributes:
        epoch, batch: their numbers, from 0 on.
        seconds: wall time that `next()` waited for it while others were ready.
        load_seconds: wall time that its worker took for it.

    >>> LateBatch(epoch=0, batch=7, seconds=0.5, load_seconds=0.6).batch
    7
    """

    epoch: int
    batch: int
    seconds: float
    load_seconds: float = 0.0


@dataclass(frozen=True)
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
        late_batches: the batches that held up others longest, the worst first, ten at most; of the last
            16,384 calls.
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
