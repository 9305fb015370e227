"""What a run measured, and the figures drawn from it. Pure: no clock, no process, no loader.

The file holds raw figures only, one of each block and of each repetition: medians, spreads, ratios and shares
are drawn from them here, for the table, the README and the plots alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

VERSION = 2
"""Of the file's layout; a file of another version is refused."""

BASELINE = "torch"
"""The peer that ratios are taken to."""


@dataclass(frozen=True)
class Block:
    """One timed stretch of iteration.

    Attributes:
        batches: how many came.
        seconds: of wall clock.
        consumer_cpu: seconds of CPU, user and system, of all threads of the consumer's process.
        worker_cpu: the same of all processes below it.
        switches: context switches of both, wanted and not.
    """

    batches: int
    seconds: float
    consumer_cpu: float = 0.0
    worker_cpu: float = 0.0
    switches: int = 0

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds


@dataclass(frozen=True)
class Latency:
    """How long `next()` took, over the calls of all blocks: percentiles in seconds."""

    calls: int
    p50: float
    p95: float
    p99: float
    longest: float


@dataclass(frozen=True)
class Peak:
    """What a peer held at its peak, alone in a fresh process: consumer and workers, interpreter and all.

    Attributes:
        pss: bytes, the highest summed proportional set size; of that
        pss_anon, pss_file, pss_shmem: private, files' and shared memory.
        shmem: bytes, the highest shared memory of the machine beyond what there was before, mapped or not.
        consumer_descriptors, worker_descriptors: the most open descriptors, all workers together.
    """

    pss: int
    pss_anon: int
    pss_file: int
    pss_shmem: int
    shmem: int
    consumer_descriptors: int
    worker_descriptors: int


@dataclass(frozen=True)
class PeerResult:
    """All that was measured of one peer on one workload: block k of every peer ran in round k.

    Attributes:
        label: the name to show.
        blocks: empty when the peer has no figures; `failure` says why.
        latency: None without blocks.
        peak: None when memory was not measured.
        notes: what a reader has to know beside the figures ("batches of numpy arrays").
        failure: why the peer is not measured, in words: not installed, cannot do it, gave wrong batches.
    """

    label: str
    blocks: list[Block] = field(default_factory=list)
    latency: Latency | None = None
    peak: Peak | None = None
    notes: list[str] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class WorkloadResult:
    """All that was measured on one workload with one number of workers.

    Attributes:
        batch_bytes: bytes of the tensors, arrays and strings in a batch, on average over a few.
        transport_bound: making a batch costs little beside getting it to the consumer.
        ceiling: blocks of the same number of processes that fetch and collate and send nothing.
        peers: by name, in the order of the report; the baseline is `BASELINE`.
    """

    name: str
    description: str
    batch_size: int
    batch_bytes: float
    transport_bound: bool
    num_workers: int
    start_method: str
    ceiling: list[Block]
    peers: dict[str, PeerResult]


@dataclass(frozen=True)
class Repeated:
    """One span of time, measured several times.

    Attributes:
        label: the peer's name to show.
        seconds: one of each repetition; empty when the peer has none, and `failure` says why.
    """

    label: str
    seconds: list[float] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class MomentResult:
    """How long one moment in a loader's life took, by peer: repetition k of every peer ran in round k.

    Attributes:
        moment: what is timed ("first batch", "epoch turn, persistent").
        workload: the name of what is loaded.
    """

    moment: str
    workload: str
    num_workers: int
    start_method: str
    peers: dict[str, Repeated]


@dataclass(frozen=True)
class Work:
    """What a worker did for one batch: their numbers, and seconds since the clock of the epoch started."""

    batch: int
    worker: int
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What took place in one epoch.

    Attributes:
        work: by batch, ascending.
        deliveries: when the consumer had each batch, in seconds as in `Work`, ascending.
    """

    work: list[Work]
    deliveries: list[float]


@dataclass(frozen=True)
class Epoch:
    """One epoch with workers that were up, from `iter()` until the consumer was done with the last batch.

    Attributes:
        seconds: of wall clock.
        waited: seconds of it within `next()`.
        worked: seconds that workers spent on samples, all together; None when samples do not tell.
        head_of_line: seconds of `waited` in which later batches were ready; None when a loader does not tell.
        window: batches that could be under way at its end; None when a loader does not tell.
    """

    seconds: float
    waited: float
    worked: float | None = None
    head_of_line: float | None = None
    window: int | None = None


@dataclass(frozen=True)
class Contender:
    """A loader, with the arguments that decide on its order.

    Attributes:
        label: the name to show.
        epochs: one of each round; empty when it has none, and `failure` says why.
        timeline: of the median epoch; None where no picture is drawn.
    """

    label: str
    epochs: list[Epoch] = field(default_factory=list)
    timeline: Timeline | None = None
    failure: str | None = None


BOUND = "bound"
"""What a goal is in multiples of, if it is no contender."""


@dataclass(frozen=True)
class Goal:
    """An epoch of the contender `of` is to take at most `times` as long as one of `base`: a contender's
    name, or `BOUND`."""

    of: str
    times: float
    base: str


@dataclass(frozen=True)
class ScheduleResult:
    """Epochs of the same batches by several contenders: epoch k of each of them ran in round k.

    Attributes:
        case: a word for it.
        batches: in an epoch.
        bound: seconds that no schedule can do without; None when it is not known.
        bounded_by: what the bound is, in words.
        list_schedule: seconds when whoever is free takes the next batch, and nothing else takes time; None
            when it is not known.
        contenders: by name, in the order of the report.
    """

    case: str
    description: str
    batches: int
    num_workers: int
    start_method: str
    bound: float | None
    bounded_by: str
    list_schedule: float | None
    goal: Goal
    contenders: dict[str, Contender]


@dataclass(frozen=True)
class KillsResult:
    """Epochs in which workers were killed, beside ones in which they were not: both of round k ran in turn.

    Attributes:
        batches: in an epoch.
        batch_seconds: what a batch costs.
        start: seconds to the first batch of a fresh loader with one worker and a batch that costs nothing.
        undisturbed, killed: seconds of an epoch.
        kills: workers that died and were replaced in each of `killed`.
        failure: why there are no figures.
    """

    description: str
    batches: int
    batch_seconds: float
    num_workers: int
    start_method: str
    start: list[float] = field(default_factory=list)
    undisturbed: list[float] = field(default_factory=list)
    killed: list[float] = field(default_factory=list)
    kills: list[int] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class Results:
    """A whole run; what was not asked for is empty.

    Attributes:
        arguments: the command line's settings, by name.
        machine: CPU, cores, memory, system, versions and date; `resumed` is when it was last gone on with.
        workloads: the steady state of each workload, for each number of workers asked for.
        by_bytes: the same for one dataset with batches of growing size.
        by_workers: the same for a few workloads with a growing number of workers.
        start: time to the first batch, by start method and number of workers.
        turns: first batch, cold first epoch, epoch turns, break and restart.
        schedule: epochs with slow samples, with a slow consumer, with samples that cost nothing.
        kills: epochs in which workers were killed.
    """

    arguments: dict[str, Any]
    machine: dict[str, Any]
    workloads: list[WorkloadResult] = field(default_factory=list)
    by_bytes: list[WorkloadResult] = field(default_factory=list)
    by_workers: list[WorkloadResult] = field(default_factory=list)
    start: list[MomentResult] = field(default_factory=list)
    turns: list[MomentResult] = field(default_factory=list)
    schedule: list[ScheduleResult] = field(default_factory=list)
    kills: list[KillsResult] = field(default_factory=list)
    version: int = VERSION


def latency(waits: Sequence[float]) -> Latency:
    """The percentiles of these waits in seconds, at least one: each is one that occurred (nearest rank)."""
    ordered = sorted(waits)

    def percentile(percent: int) -> float:
        return ordered[-(-percent * len(ordered) // 100) - 1]

    return Latency(len(ordered), percentile(50), percentile(95), percentile(99), ordered[-1])


# ---- figures ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A figure with the lowest and the highest of what it was drawn from."""

    median: float
    low: float
    high: float

    def scaled(self, by: float) -> Spread:
        """The same in another unit."""
        return Spread(self.median * by, self.low * by, self.high * by)


def spread(values: Sequence[float]) -> Spread:
    return Spread(statistics.median(values), min(values), max(values))


def _each(blocks: Sequence[Block], figure: Callable[[Block], float]) -> Spread:
    """A figure of each block that had batches."""
    return spread([figure(block) / block.batches for block in blocks if block.batches])


def rate(blocks: Sequence[Block]) -> Spread:
    """Batches per second: the median block, the slowest and the fastest."""
    return spread([block.rate for block in blocks])


def cpu(blocks: Sequence[Block]) -> Spread:
    """Seconds of CPU for a batch, consumer and workers together."""
    return _each(blocks, lambda block: block.consumer_cpu + block.worker_cpu)


def consumer_cpu(blocks: Sequence[Block]) -> Spread:
    """Seconds of the consumer's CPU for a batch."""
    return _each(blocks, lambda block: block.consumer_cpu)


def worker_cpu(blocks: Sequence[Block]) -> Spread:
    """Seconds of all workers' CPU for a batch."""
    return _each(blocks, lambda block: block.worker_cpu)


def switches(blocks: Sequence[Block]) -> Spread:
    """Context switches for a batch."""
    return _each(blocks, lambda block: block.switches)


def rate_ratio(blocks: Sequence[Block], baseline: Sequence[Block]) -> Spread:
    """Ratio of the median rates (above 1: faster); its spread is that of the ratios within each round.

    Blocks of one round ran within seconds of each other: what slows the machine for longer cancels out. With
    the ceiling's blocks for a baseline it is the share of the ceiling.
    """
    rounds = [block.rate / base.rate for block, base in zip(blocks, baseline, strict=True)]
    return Spread(rate(blocks).median / rate(baseline).median, min(rounds), max(rounds))


def time_ratio(baseline: Sequence[float], seconds: Sequence[float]) -> Spread:
    """How many times shorter `seconds` are than the baseline's; the spread is that within each round."""
    rounds = [base / own for base, own in zip(baseline, seconds, strict=True)]
    return Spread(statistics.median(baseline) / statistics.median(seconds), min(rounds), max(rounds))


def within_noise(ratio: Spread) -> bool:
    """Whether the rounds disagree on which of the two is faster."""
    return ratio.low <= 1 <= ratio.high
