"""The facts about a run: from a loader's arguments, its counters, and the machine.

Runs in the consumer, on the thread that asks for a diagnosis. Reads names of classes and functions, and runs
no code of the user's.
"""

from __future__ import annotations

from dataclasses import replace
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler
from torch.utils.data._utils.collate import default_collate, default_convert

from fastq_loader import options
from fastq_loader.epoch.resources import device_session
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.extras.insight import causes, machine, processes
from fastq_loader.extras.insight.model import LoaderFacts, RunProfile, Setting, costs_of, is_enough
from fastq_loader.extras.insight.snapshots import EpochStatistics, LoaderStatistics, WorkerStatistics
from fastq_loader.system import pages
from fastq_loader.system.unpatched import time
from fastq_loader.workers.kinds import Auto

#: Types whose instances have a `__qualname__` that can be read without running user code.
_FUNCTIONS = (type, FunctionType, BuiltinFunctionType, MethodType)


def statistics_of(loader: Any) -> LoaderStatistics:
    """A snapshot of a loader's counters."""
    resources = resources_of(loader)
    if logs := list(resources.counters.logs.values()):
        logs[-1].used_cpu(time.process_time_ns())
    else:  # usually created when an epoch begins; it counts the copies
        device_session(resources, options.of(loader).device)
    blocks = [(0, 0, 0), *(pool.blocks() for pool in list(resources.pools))]
    in_use, free, nbytes = map(sum, zip(*blocks, strict=True))
    return causes.snapshot(
        resources.counters,
        blocks_in_use=in_use,
        blocks_free=free,
        arena_bytes=nbytes,
        bad_samples=getattr(resources.bad_samples, "total", 0),
        last_bad_samples=getattr(resources.bad_samples, "last", ()),
    )


def profile_of(loader: Any, epoch: int | str | None, is_cached: bool) -> RunProfile:
    """Facts of a loader's runs.

    Args:
        loader: the loader.
        epoch: its number, "all" for all together, or None for the newest one long enough for a diagnosis.
        is_cached: whether the program has a cache.

    Raises:
        ValueError: there is no such epoch.
    """
    statistics, counters = statistics_of(loader), resources_of(loader).counters
    asked = _asked(statistics, epoch)
    number = _newest(statistics).epoch if asked.epoch is None else asked.epoch
    found = [each for each in causes.breakdowns(counters) if each.epoch.epoch == number]
    loaded = found[0] if found else causes.Breakdown(EpochStatistics())
    # Without workers nothing is packed. The loader may have had workers in another epoch.
    workers = statistics.workers if any(pack for _, _, pack in loaded.costs) else ()
    # For workers the kernel reports the wait for a CPU by thread, if it can.
    load_cpu = causes.cpu_share(counters) if workers else None
    contention = 0.0 if load_cpu is not None else machine.contention()
    # A subclass may have no attributes before its first epoch.
    setting, arguments = of_arguments(loader) if statistics.epochs else (Setting(0), LoaderFacts())
    return RunProfile(
        epoch=asked,
        costs=costs_of(loaded, load_cpu, counters.batch_bytes, contention),
        setting=replace(setting, num_workers=len(workers)),
        cpus=machine.cpus(),
        machine_bytes=pages.installed(),
        workers=workers,
        late=tuple(late for late in statistics.late_batches if asked.epoch in (None, late.epoch)),
        staging=statistics.staging,
        loader=arguments,
        free_bytes=machine.memory_bytes(),
        private_bytes=tuple(map(private_bytes, workers)),
        is_cached=is_cached,
    )


def private_bytes(worker: WorkerStatistics) -> int:
    """Memory that a worker does not share; 0 if it has ended, or runs on another machine."""
    found = None if worker.node is not None else processes.shared_and_private(worker.pid)
    return 0 if found is None else found[1]


def _newest(statistics: LoaderStatistics) -> EpochStatistics:
    """The newest epoch long enough for a diagnosis, else the newest."""
    newest_first = [*statistics.per_epoch[::-1], EpochStatistics()]
    return next(filter(is_enough, newest_first), newest_first[0])


def _asked(statistics: LoaderStatistics, epoch: int | str | None) -> EpochStatistics:
    kept: dict[Any, EpochStatistics] = {each.epoch: each for each in statistics.per_epoch}
    known = {**kept, "all": statistics.total, None: _newest(statistics)}
    if epoch in known:
        return known[epoch]
    there = f"of the epochs {min(kept)} to {max(kept)}" if kept else "of an epoch, once there is one"
    raise ValueError(
        f"epoch={epoch!r} is unknown: use the number {there}, 'all' for all together, or None for the newest"
    )


def of_arguments(loader: Any) -> tuple[Setting, LoaderFacts]:
    """A loader's arguments, but for its number of workers."""
    resources, sampler = options.of(loader), loader._index_sampler
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    iterable = options.is_iterable(loader)
    any_worker = not loader.in_order or (resources.is_dynamic and not iterable)
    arguments = LoaderFacts(
        iterable=iterable,
        persistent=loader.persistent_workers,
        chooses_workers=isinstance(loader.num_workers, Auto),
        in_order=loader.in_order,
        shuffles=type(sampler) is RandomSampler,
        sampler=type(sampler).__qualname__,
        collate=_name(loader.collate_fn),
        transform=_name(resources.device and resources.device.transform),
        pins=loader.pin_memory,
        batch_size=loader.batch_size or 0,
    )
    return Setting(0, loader.prefetch_factor or 2, any_worker, resources.schedule.window), arguments


def _name(function: Any) -> str:
    """The name of a user's function; "" for torch's own functions."""
    if any(function is each for each in (None, default_collate, default_convert)):
        return ""
    kind = type(function)
    return str(function.__qualname__ if kind in _FUNCTIONS else kind.__qualname__)
