"""What is known of a run: what the verdict and its advice are based on, and what its batches cost.

Pure. With workers every cost is measured. Without them nothing is known of what they would add, so a batch of
the least size is assumed; and nothing tells the CPU time of loading from that of the step, so as much of it
as fits is the loading's: then no more is promised of workers than they can give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fastq_loader.insight.model import Costs, Setting
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.snapshots import (
    CAUSES,
    EpochStatistics,
    LateBatch,
    StagingStatistics,
    WorkerStatistics,
)

if TYPE_CHECKING:
    from fastq_loader.statistics.counters import WorkerCounters

#: Batches and seconds from which on an epoch says something. Shorter ones are told from noise by nothing.
BATCHES, SECONDS = 8, 0.05
#: Seconds that packing a small batch takes a worker, and that its message and unpacking take the consumer.
_LEAST_PACK, _LEAST_OVERHEAD = 50e-6, 100e-6


@dataclass(frozen=True)
class Evidence:
    """What is known of a run.

    Attributes:
        epoch: where its time went.
        costs: what its batches cost; None before the first.
        setting: what was chosen, as the model has it: batches that are handed out as they come are nobody's
            in particular, as with a dynamic schedule.
        cpus: how many CPUs all processes may use together.
        workers: what they did; none without workers.
        late: batches of the epoch that held up others, the worst first.
        staging: copies to the device; None without one.
        iterable: the dataset is read in order, and not by index.
        persistent: workers stay from one epoch to the next.
        in_order: batches come in the order of the sampler.
        shuffles: torch's own sampler shuffles the indices.
        sampler: the name of the class of the sampler.
        collate: the name of the user's function; "" where it is torch's.
        transform: the name of the user's function for batches here or on the device; "" where there is none.
        pins: batches are copied to page-locked memory in `next()`.
    """

    epoch: EpochStatistics
    costs: Costs | None = None
    setting: Setting = field(default=Setting(0))
    cpus: float = 1.0
    workers: tuple[WorkerStatistics, ...] = ()
    late: tuple[LateBatch, ...] = ()
    staging: StagingStatistics | None = None
    iterable: bool = False
    persistent: bool = False
    in_order: bool = True
    shuffles: bool = False
    sampler: str = ""
    collate: str = ""
    transform: str = ""
    pins: bool = False

    @property
    def shares(self) -> dict[str, float]:
        """The share of each cause in the time of the epoch, from 0 to 1."""
        return {cause: self.epoch.spent_on(cause) / (self.epoch.seconds or 1) for cause in CAUSES}

    @property
    def busy(self) -> float:
        """The part of the epoch in which the workers were busy, from 0 to 1."""
        if self.costs is None or not (self.setting.num_workers and self.epoch.seconds):
            return 0.0
        work = (self.costs.load + self.costs.pack) * self.epoch.batches
        return min(1.0, work / (self.setting.num_workers * self.epoch.seconds))

    @property
    def new_memory(self) -> float:
        """The part of the workers' work in which new pages were mapped, from 0 to 1."""
        work = sum(worker.work_seconds for worker in self.workers)
        return sum(worker.new_memory_seconds for worker in self.workers) / work if work else 0.0


def is_enough(epoch: EpochStatistics, batches: int = BATCHES) -> bool:
    """Whether an epoch was long enough to say something."""
    return epoch.batches >= batches and epoch.seconds >= SECONDS


def costs_of(
    epoch: EpochCounters, workers: Sequence[WorkerCounters], contention: float = 0.0
) -> Costs | None:
    """What a batch of an epoch cost; None before the first.

    Args:
        epoch: its counters.
        workers: those that loaded it; none where the consumer did.
        contention: the part of the time in which processes of this machine waited for a CPU, from 0 to 1. As
            much of what loading did without a CPU is taken for that, and not for a disk or a network.
    """
    ordered = sorted(epoch.costs)
    if not ordered or not epoch.batches:
        return None
    mean = sum(cost.load for cost in ordered) / len(ordered)
    scale = epoch.load / mean if mean else 1.0  # what is kept stands for all
    loads = tuple(cost.load / 1e9 * scale for cost in ordered)
    seconds = {cause: nanoseconds / 1e9 / epoch.batches for cause, nanoseconds in epoch.spent.items()}
    cpu = epoch.cpu / 1e9 / epoch.batches
    if workers:
        pack = sum(cost.pack for cost in ordered) / 1e9 / len(ordered)
        overhead = max(0.0, seconds["transport"] - epoch.in_transit / 1e9 / epoch.batches)
        load_cpu = _cpu_share(workers)
        step_cpu = cpu - overhead - seconds["sampler"] - seconds["device_copy"]
    else:
        load = seconds["workers"]
        load_cpu = min(1.0, cpu / load) if load and cpu else 1.0
        pack, overhead = _LEAST_PACK, _LEAST_OVERHEAD
        step_cpu = cpu - load * load_cpu
    return Costs(
        loads,
        pack=pack,
        overhead=overhead,
        device=seconds["device_copy"],
        draw=seconds["sampler"],
        step=seconds["consumer"],
        load_cpu=load_cpu + (1 - load_cpu) * contention,
        step_cpu=max(0.0, step_cpu),
    )


def _cpu_share(workers: Sequence[WorkerCounters]) -> float:
    """The part of their work in which workers used a CPU; all of it where that is not known."""
    marks = [worker.cpu_marks for worker in workers if len(worker.cpu_marks) > 1]
    work = sum(last[1] - first[1] for first, last in marks)
    cpu = sum(last[0] - first[0] for first, last in marks)
    return min(1.0, cpu / work) if work > 0 else 1.0
