"""Model of a run: the costs of its batches, and its duration with other settings.

Pure. The model behind every expected gain simulates the loader, with the observed costs of batches and these
rules:

- Batch k may be begun when batch k - window was delivered. With `round_robin` worker k mod N loads it, with
  `dynamic` the worker that is free first.
- A worker needs `load` and `pack` for it. Batches are delivered in order, each `overhead` after it is there
  and the previous step is done; then comes the step. Without workers a batch takes `load` and the step, one
  after the other.
- All processes together cannot use more CPUs than there are: a batch takes at least its CPU time divided by
  the CPUs.

It ignores that processes slow each other down over memory and caches, that reading may have a limit of its
own (a disk, a network), and that without workers a step may overlap with nothing at all.

With workers every cost is measured. Without them the costs that they would add are unknown, so the costs of
a minimal batch are assumed. The CPU time of loading is unknown too, because it is measured together with that
of the step. As much of it as fits is attributed to loading, so that the gain of workers is not overestimated.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import cycle, islice
from typing import TYPE_CHECKING

from fastq_loader.extras.insight.snapshots import (
    CAUSES,
    EpochStatistics,
    LateBatch,
    WorkerStatistics,
)
from fastq_loader.scheduling.schedules import Dynamic, RoundRobin, Window
from fastq_loader.statistics.snapshots import StagingStatistics

if TYPE_CHECKING:
    from fastq_loader.extras.insight.causes import Breakdown

#: Simulated batches. After some hundred the mean does not move by more than a percent.
_BATCHES = 600
#: Minimum batches and seconds of an epoch for a diagnosis. Shorter ones cannot be distinguished from noise.
BATCHES, SECONDS = 8, 0.05
#: Seconds in which a worker packs a small batch, and in which the consumer reads its message and unpacks it.
_LEAST_PACK, _LEAST_OVERHEAD = 50e-6, 100e-6


@dataclass(frozen=True)
class Costs:
    """Observed costs of batches, in seconds.

    Attributes:
        loads: reading samples and collating them, for each batch in the order of batches.
        pack: writing a batch to shared memory.
        overhead: the consumer's time for each batch from a worker: messages and unpacking.
        device: the consumer's time to move a batch to the device, with workers and without.
        draw: the sampler's time for each batch.
        step: the consumer's time outside of the loader for each batch.
        load_cpu: the part of `loads` and `pack` in which a CPU was used, from 0 to 1.
        step_cpu: CPU time of the consumer in a step.
        batch_bytes: shared memory of a batch.
    """

    loads: tuple[float, ...]
    pack: float = 0.0
    overhead: float = 0.0
    device: float = 0.0
    draw: float = 0.0
    step: float = 0.0
    load_cpu: float = 1.0
    step_cpu: float = 0.0
    batch_bytes: float = 0.0

    @property
    def load(self) -> float:
        """The mean of `loads`."""
        return sum(self.loads) / len(self.loads)

    @property
    def cpu(self) -> float:
        """CPU time of all processes for a batch from a worker."""
        return (self.load + self.pack) * self.load_cpu + self.overhead + self.draw + self.step_cpu


@dataclass(frozen=True)
class Setting:
    """A setting that can be chosen.

    Attributes:
        num_workers: number of workers; 0 loads on the consumer's thread.
        prefetch_factor: batches that each worker loads ahead.
        dynamic: whether any free worker takes the next batch; otherwise they take turns.
        fixed_window: window set by the user; None means derived from the other fields.
        start_method: "fork", "spawn" or "forkserver"; None is the loader's own.
    """

    num_workers: int
    prefetch_factor: int = 2
    dynamic: bool = False
    fixed_window: int | None = None
    start_method: str | None = None

    def window(self, batch_bytes: float, machine_bytes: int) -> int:
        """Number of batches that may be under way while the next one is late, for batches of `batch_bytes`
        bytes of shared memory on a machine with `machine_bytes` of memory."""
        schedule = (Dynamic if self.dynamic else RoundRobin)(self.fixed_window)
        workers, ahead = self.num_workers, self.prefetch_factor
        window = Window.of(
            schedule, workers=workers, prefetch=ahead, iterable=False, memory_bytes=machine_bytes
        )
        return window.reach(batch_bytes)


def seconds_per_batch(costs: Costs, setting: Setting, cpus: float, machine_bytes: int = sys.maxsize) -> float:
    """Average wall time of a batch, with the step.

    Args:
        costs: of at least one batch.
        setting: the setting to rate.
        cpus: number of CPUs that all processes may use together.
        machine_bytes: memory of the machine.
    """
    if setting.num_workers == 0:
        return costs.draw + costs.load + costs.device + costs.step
    window = setting.window(costs.batch_bytes, machine_bytes)
    return max(_played(costs, setting, window), costs.cpu / cpus)


def _played(costs: Costs, setting: Setting, window: int) -> float:
    free = [0.0] * setting.num_workers
    handed_out: list[float] = []
    between = costs.overhead + costs.draw + costs.device
    now = 0.0  # time at which the consumer requests the next batch
    for number, load in enumerate(islice(cycle(costs.loads), max(_BATCHES, len(costs.loads)))):
        allowed = handed_out[number - window] if number >= window else 0.0
        worker = free.index(min(free)) if setting.dynamic else number % setting.num_workers
        free[worker] = max(free[worker], allowed) + load + costs.pack
        handed_out.append(max(now, free[worker]) + between)
        now = handed_out[-1] + costs.step
    # The first batches find an empty window, and a pause at the start does not count for the rate.
    skipped = min(window, len(handed_out) // 2)
    return (now - (handed_out[skipped - 1] + costs.step)) / (len(handed_out) - skipped)


# ---- facts of a run ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoaderFacts:
    """Facts that follow from a loader's arguments.

    Attributes:
        iterable: whether the dataset is read in order, and not by index.
        persistent: whether workers stay from one epoch to the next.
        chooses_workers: whether the loader chooses the number of workers itself.
        in_order: whether batches are delivered in the order of the sampler.
        shuffles: whether torch's own sampler shuffles the indices.
        sampler: class name of the sampler.
        collate: name of the user's function; "" if it is torch's.
        transform: name of the user's function for batches here or on the device; "" without one.
        pins: whether batches are copied to page-locked memory, unless there is a device.
        batch_size: samples of a batch; 0 if it is not a single number.
    """

    iterable: bool = False
    persistent: bool = False
    chooses_workers: bool = False
    in_order: bool = True
    shuffles: bool = False
    sampler: str = ""
    collate: str = ""
    transform: str = ""
    pins: bool = False
    batch_size: int = 0


@dataclass(frozen=True)
class RunProfile:
    """Facts of a run.

    Attributes:
        epoch: time of the epoch by cause.
        costs: of its batches; None before the first.
        setting: the setting in terms of the model: batches that are delivered in the order of completion
            belong to no particular worker, as with a dynamic schedule.
        cpus: number of CPUs that all processes may use together.
        machine_bytes: memory of the machine.
        workers: activity of the workers; empty without workers.
        late: batches of the epoch that held up others, the worst first.
        staging: copies to the device; None without one.
        loader: the loader's arguments.
        free_bytes: memory available to a cache.
        private_bytes: memory that each worker does not share, where it is known.
        is_cached: whether the program has a cache.
    """

    epoch: EpochStatistics = field(default=EpochStatistics())
    costs: Costs | None = None
    setting: Setting = field(default=Setting(0))
    cpus: float = 1.0
    machine_bytes: int = sys.maxsize
    workers: tuple[WorkerStatistics, ...] = ()
    late: tuple[LateBatch, ...] = ()
    staging: StagingStatistics | None = None
    loader: LoaderFacts = field(default=LoaderFacts())
    free_bytes: int = 0
    private_bytes: tuple[int, ...] = ()
    is_cached: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """Share of each cause in the time of the epoch, from 0 to 1."""
        seconds = {cause: self.epoch.spent_on(cause) for cause in CAUSES}
        return {cause: each / (sum(seconds.values()) or 1) for cause, each in seconds.items()}

    @property
    def busy(self) -> float:
        """Share of the epoch in which the workers were busy, from 0 to 1."""
        if self.costs is None or not (self.setting.num_workers and self.epoch.seconds):
            return 0.0
        work = (self.costs.load + self.costs.pack) * self.epoch.batches
        return min(1.0, work / (self.setting.num_workers * self.epoch.seconds))

    @property
    def fetching(self) -> float:
        """Share of loading in which workers read samples, from 0 to 1; 0.0 without workers."""
        fetch = sum(worker.fetch_seconds for worker in self.workers)
        load = fetch + sum(worker.collate_seconds for worker in self.workers)
        return fetch / load if load else 0.0

    @property
    def new_memory(self) -> float:
        """Share of the workers' work in which new pages were mapped, from 0 to 1."""
        work = sum(worker.work_seconds for worker in self.workers)
        return sum(worker.new_memory_seconds for worker in self.workers) / work if work else 0.0


def is_enough(epoch: EpochStatistics, batches: int = BATCHES) -> bool:
    """Whether an epoch was long enough for a diagnosis."""
    return epoch.batches >= batches and epoch.seconds >= SECONDS


def costs_of(
    epoch: Breakdown, load_cpu: float | None, batch_bytes: float = 0.0, contention: float = 0.0
) -> Costs | None:
    """Costs of a batch of an epoch; None before the first.

    Args:
        epoch: where its time went.
        load_cpu: the share of the workers' work in which they used a CPU; None: the consumer loaded.
        batch_bytes: shared memory of a batch.
        contention: share of the time in which processes of this machine waited for a CPU, from 0 to 1. This
            share of the loading time without a CPU is attributed to that wait, not to a disk or a network.
    """
    batches = epoch.epoch.recorded_batches
    if not epoch.costs or not batches:
        return None
    _, loads, packs = zip(*epoch.costs, strict=True)
    mean = sum(loads) / len(loads)
    scale = epoch.load / mean if mean else 1.0  # the last batches represent all
    seconds = {cause: epoch.epoch.spent_on(cause) / batches for cause in CAUSES}
    cpu = epoch.epoch.cpu_seconds / max(1, epoch.epoch.batches)
    if load_cpu is not None:
        pack = sum(packs) / 1e9 / len(packs)
        overhead = max(0.0, seconds["transport"] - epoch.in_transit / batches)
        step_cpu = cpu - overhead - seconds["sampler"] - seconds["device_copy"]
    else:
        load = seconds["workers"]
        load_cpu = min(1.0, cpu / load) if load and cpu else 1.0
        pack, overhead = _LEAST_PACK, _LEAST_OVERHEAD
        step_cpu = cpu - load * load_cpu
    return Costs(
        tuple(load / 1e9 * scale for load in loads),
        pack=pack,
        overhead=overhead,
        device=seconds["device_copy"],
        draw=seconds["sampler"],
        step=seconds["consumer"],
        load_cpu=load_cpu + (1 - load_cpu) * contention,
        step_cpu=max(0.0, step_cpu),
        batch_bytes=batch_bytes,
    )
