"""`loader.diagnose()`: what a loader knows of its runs, as evidence for the verdict.

Runs in the consumer, on the thread that asks, and changes nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data._utils.collate import default_collate, default_convert

from fastq_loader import arguments
from fastq_loader.device.options import read_device
from fastq_loader.insight.evidence import Evidence, costs_of, is_enough
from fastq_loader.insight.machine import cpus
from fastq_loader.insight.model import Setting
from fastq_loader.insight.verdict import Diagnosis
from fastq_loader.insight.verdict import diagnose as verdict
from fastq_loader.scheduling.schedules import read_schedule
from fastq_loader.statistics.epoch import EpochCounters
from fastq_loader.statistics.snapshots import EpochStatistics, LoaderStatistics
from fastq_loader.system import calls

if TYPE_CHECKING:
    from fastq_loader.loader import DataLoader


def diagnose(loader: DataLoader[Any], epoch: int | None) -> Diagnosis:
    """See `DataLoader.diagnose`."""
    statistics = loader.statistics()
    counters = loader._resources.counters
    asked = _asked(statistics, epoch)
    if not statistics.epochs:  # and a subclass may have no attributes yet
        return Diagnosis("unknown", 0.0)
    history = {counted.epoch: counted for counted in list(counters.history)}
    loaded = history.get(asked.epoch or _newest(statistics).epoch, EpochCounters(0, 0))
    # Without workers nothing is packed. The loader may have had some in another epoch.
    workers = counters.workers if any(cost.pack for cost in list(loaded.costs)) else ()
    to_device = read_device(loader.device)
    dynamic = arguments.is_dynamic(loader) and not arguments.is_iterable(loader)
    sampler = loader._index_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    return verdict(
        Evidence(
            asked,
            # Of workers the kernel says it thread by thread, where it does.
            costs_of(loaded, workers, 0.0 if workers and calls.waited_for_cpu() else contention()),
            Setting(
                len(workers),
                loader.prefetch_factor or 2,
                dynamic or not loader.in_order,
                read_schedule(loader.schedule).window,
            ),
            cpus(),
            statistics.workers if workers else (),
            tuple(late for late in statistics.late_batches if asked.epoch in (0, late.epoch)),
            statistics.staging,
            iterable=arguments.is_iterable(loader),
            persistent=loader.persistent_workers,
            in_order=loader.in_order,
            shuffles=type(sampler) is RandomSampler,
            sampler=type(sampler).__qualname__,
            collate=_name(loader.collate_fn),
            transform="" if to_device is None else _name(to_device.transform),
            pins=loader.pin_memory and statistics.staging is None,
        )
    )


def contention(file: Path = Path("/proc/pressure/cpu")) -> float:
    """The part of the last ten seconds in which some process waited for a CPU; 0.0 where no kernel says."""
    try:
        return float(file.read_text().split("avg10=")[1].split()[0]) / 100
    except (OSError, IndexError, ValueError):
        return 0.0


def _newest(statistics: LoaderStatistics) -> EpochStatistics:
    """The newest epoch that says something, or the newest."""
    newest_first = statistics.per_epoch[::-1]
    return next(filter(is_enough, newest_first), newest_first[0] if newest_first else EpochStatistics())


def _asked(statistics: LoaderStatistics, epoch: int | None) -> EpochStatistics:
    if epoch is None:
        return _newest(statistics)
    for found in (statistics.total, *statistics.per_epoch):
        if found.epoch == epoch:
            return found
    kept = [found.epoch for found in statistics.per_epoch]
    there = f"of the epochs {kept[0]} to {kept[-1]}" if kept else "of an epoch, once there is one"
    raise ValueError(
        f"epoch={epoch!r} is unknown: use the number {there}, 0 for all together, or None for the newest"
    )


def _name(function: Any) -> str:
    """The name of a user's function."""
    if function in (None, default_collate, default_convert):
        return ""
    return str(getattr(function, "__qualname__", type(function).__qualname__))
