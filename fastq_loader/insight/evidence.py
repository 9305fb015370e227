"""What is known of a run: what the verdict and its advice are based on.

Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fastq_loader.insight.model import Costs, Setting
from fastq_loader.statistics.snapshots import (
    CAUSES,
    EpochStatistics,
    LateBatch,
    StagingStatistics,
    WorkerStatistics,
)

#: Batches and seconds from which on an epoch says something. Shorter ones are told from noise by nothing.
BATCHES, SECONDS = 8, 0.05


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
