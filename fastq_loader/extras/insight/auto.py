"""`num_workers="auto"`: chooses the number of workers of the next epoch.

`decide` is pure; the rest runs in the consumer, when an epoch begins. The first epoch gets as many workers as
there are CPUs. From its costs the model estimates the speed of every other number. The model ignores caches
and the cost of starting workers, so a number that was tried is rated by its measurement, see `chooser`.

More workers must promise a gain larger than the noise, so that two equal numbers do not alternate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fastq_loader import options
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.extras.insight import causes, machine
from fastq_loader.extras.insight.chooser import NOISE, Limits, rank
from fastq_loader.extras.insight.model import Costs, Setting, costs_of
from fastq_loader.statistics.counters import Counters
from fastq_loader.system import calls
from fastq_loader.workers.kinds import Auto

#: Minimum gain for more workers.
_GAIN = 0.05
#: Maximum for the first epoch: it has to show the cost of a batch, and memory may be short.
_MOST_AT_FIRST = 8
#: Minimum batches for an epoch that was broken off to count.
_ENOUGH = 16
#: Epochs remembered for each number of workers.
_REMEMBERED = 3


@dataclass(frozen=True)
class Measurement:
    """Measurement of an epoch.

    Attributes:
        workers: number of workers.
        seconds: wall time of a batch, with the step.
        costs: of its batches.
    """

    workers: int
    seconds: float
    costs: Costs


def remember(seen: list[Measurement], epoch: Measurement) -> None:
    """Add an epoch, and drop the oldest of its number. A forgotten number would be tried again and again."""
    alike = [each for each in seen if each.workers == epoch.workers]
    if len(alike) == _REMEMBERED:
        seen.remove(alike[0])
    seen.append(epoch)


def decide(seen: Sequence[Measurement], limits: Limits) -> int:
    """Choose the number of workers of the next epoch.

    Args:
        seen: epochs, the newest last; at least one.
        limits: settings to choose from; its own setting is the newest epoch's.
    """
    costs, own = _with_transport(seen), limits.own
    measured: dict[Setting, list[float]] = {}
    for epoch in seen:  # as if with the newest step
        setting, change = replace(own, num_workers=epoch.workers), 1.0
        if abs(epoch.costs.step - costs.step) > epoch.seconds * NOISE:
            now = replace(epoch.costs, step=costs.step, step_cpu=costs.step_cpu)
            change = limits.seconds(now, setting) / limits.seconds(epoch.costs, setting)
        if limits.allow(setting, costs):
            measured.setdefault(setting, []).append(epoch.seconds * change)
    ranked = rank(costs, {setting: fmean(each) for setting, each in measured.items()}, limits)
    best = next(iter(ranked))
    if best.num_workers > own.num_workers and ranked.get(own, math.inf) <= ranked[best] * (1 + _GAIN):
        best = own
    return best.num_workers


def _with_transport(seen: Sequence[Measurement]) -> Costs:
    """The newest costs; if they were measured without workers, with transport costs of an older epoch."""
    newest = seen[-1].costs
    of = next((epoch.costs for epoch in reversed(seen) if epoch.workers), newest)
    return replace(newest, pack=of.pack, overhead=of.overhead, load_cpu=of.load_cpu)


# ---- the interface for loaders -------------------------------------------------------------------


def given(num_workers: str | Auto) -> Auto:
    """Read the argument `num_workers` that is a string; "auto" becomes the number of workers of the first
    epoch. An `Auto` is that of another loader, from whose attributes this one is rebuilt.

    Raises:
        ValueError: it is another string.
    """
    if isinstance(num_workers, Auto):
        return num_workers
    if num_workers != "auto":
        raise ValueError(f"num_workers={num_workers!r} is unknown: use a number of workers, or 'auto'")
    return Auto(0 if calls.missing() else min(math.ceil(machine.cpus()), _MOST_AT_FIRST))


def check(loader: Any) -> None:
    """Check that the batches of a loader do not depend on the number of its workers.

    Raises:
        ValueError: they do.
    """
    if not options.of(loader).is_dynamic:
        raise ValueError(
            f"num_workers='auto' cannot go with schedule={options.of(loader).schedule}: the random numbers "
            "of its batches depend on how many workers there are. Use schedule='dynamic', where they do "
            "not, or a number; tune() finds one"
        )
    if options.is_iterable(loader):
        raise ValueError(
            "num_workers='auto' cannot go with an IterableDataset: each worker reads a part of it, so that "
            "the batches depend on how many there are. Use a number; tune() finds one"
        )


def begin_epoch(loader: Any) -> None:
    """Set the number of workers for the next epoch of a loader. If it changes, persistent workers end."""
    resources, number = resources_of(loader), int(loader.num_workers)
    if resources.saved is not None:  # the rest of an epoch; it may have a state per worker
        chosen = len(resources.saved.progress.workers) or number
    else:
        resources.chooser = resources.chooser or Chooser()
        prefetch, stay = loader.prefetch_factor or 2, loader.persistent_workers
        chosen = resources.chooser.next_number(number, resources.counters, prefetch, stay)
    if chosen != number and loader.persistent_workers:
        resources.close_pools(f"num_workers='auto' has changed to {chosen}")
    loader.num_workers = Auto(chosen)


class Chooser:
    """Measurements of a loader's epochs, to choose the number of workers of the next one.

    Attributes:
        seen: epochs whose number of workers was chosen.
    """

    def __init__(self) -> None:
        self.seen: list[Measurement] = []
        self._before: int | None = None  # number of workers of the epoch before

    def next_number(self, number: int, counters: Counters, prefetch: int, persistent: bool) -> int:
        """Choose the number of workers of the epoch that begins now.

        Args:
            number: of the previous epoch.
            counters: the loader's.
            prefetch: batches that each worker loads ahead.
            persistent: whether workers stay from one epoch to the next.
        """
        if calls.missing():
            return 0
        epoch = causes.newest(counters)
        if epoch is None or not (epoch.over or epoch.epoch.batches >= _ENOUGH):
            return number
        load_cpu = causes.cpu_share(counters) if number else None
        costs = costs_of(epoch, load_cpu, counters.batch_bytes)
        if costs is None:
            return number
        before, self._before = self._before, number
        # Persistent workers have just started: that epoch is not representative, and the next one counts.
        if persistent and number and before not in (None, number):
            return number
        took = epoch.seconds - (epoch.epoch.start_up_seconds if persistent else 0)
        remember(self.seen, Measurement(number, took / epoch.epoch.recorded_batches, costs))
        limits = machine.limits(Setting(number, prefetch, dynamic=True))
        held = limits.needed(limits.own, costs) if persistent else 0.0  # memory that workers have already
        return decide(self.seen, replace(limits, memory_bytes=limits.memory_bytes + held))
