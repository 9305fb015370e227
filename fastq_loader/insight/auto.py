"""`num_workers="auto"`: how many workers the next epoch gets.

`decide` is pure; the rest runs in the consumer, when an epoch begins. The first epoch gets as many workers as
there are CPUs. What it cost tells the model what every other number is worth. The model knows neither the
caches nor what a start of workers costs. So a number that was seen is worth what was measured, see `chooser`.

More workers must promise a gain that is larger than the noise: two equal numbers do not take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fastq_loader.insight import machine
from fastq_loader.insight.chooser import NOISE, Limits, rank
from fastq_loader.insight.model import Costs, Setting, costs_of
from fastq_loader.statistics.counters import Counters
from fastq_loader.system import calls
from fastq_loader.workers.kinds import Auto

#: The gain that more workers must promise.
_GAIN = 0.05
#: Workers of the first epoch, at most: it has to show what a batch costs, and memory may be short.
_MOST_AT_FIRST = 8
#: Batches of an epoch that was broken off, from which it counts.
_ENOUGH = 16
#: Epochs that are remembered of each number of workers.
_REMEMBERED = 3


@dataclass(frozen=True)
class Seen:
    """An epoch that was seen.

    Attributes:
        workers: how many it had.
        seconds: wall time of a batch, with the step.
        costs: of its batches.
    """

    workers: int
    seconds: float
    costs: Costs


def remember(seen: list[Seen], epoch: Seen) -> None:
    """Add an epoch, and forget old ones. Not all of a number: it would be tried again and again."""
    alike = [each for each in seen if each.workers == epoch.workers]
    if len(alike) == _REMEMBERED:
        seen.remove(alike[0])
    seen.append(epoch)


def decide(seen: Sequence[Seen], limits: Limits) -> int:
    """How many workers the next epoch gets.

    Args:
        seen: epochs, the newest last; at least one.
        limits: what may be chosen; its own setting is the newest epoch's.
    """
    costs, own = _with_transport(seen), limits.own
    measured: dict[Setting, list[float]] = {}
    for epoch in seen:  # with the step as it is now
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


def _with_transport(seen: Sequence[Seen]) -> Costs:
    """The newest costs. An epoch without workers does not tell what they add, so an older one does."""
    newest = seen[-1].costs
    of = next((epoch.costs for epoch in reversed(seen) if epoch.workers), newest)
    return replace(newest, pack=of.pack, overhead=of.overhead, load_cpu=of.load_cpu)


# ---- what a loader asks --------------------------------------------------------------------------


def given(num_workers: Any) -> Any:
    """Read the argument `num_workers`: for "auto", the workers of the first epoch.

    Raises:
        ValueError: it is another string.
    """
    if not isinstance(num_workers, str):
        return num_workers
    if num_workers != "auto":
        raise ValueError(f"num_workers={num_workers!r} is unknown: use a number of workers, or 'auto'")
    return Auto(0 if calls.missing() else min(math.ceil(machine.cpus()), _MOST_AT_FIRST))


class Chooser:
    """Memory of a loader's epochs, to choose how many workers the next one gets.

    Attributes:
        seen: epochs whose number of workers was chosen.
    """

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self._started: int | None = None  # workers that were seen in no epoch but that in which they started

    def next_number(self, number: int, counters: Counters, prefetch: int, persistent: bool) -> int:
        """How many workers the epoch that begins now gets.

        Args:
            number: those of the epoch before.
            counters: the loader's.
            prefetch: batches that each works ahead.
            persistent: they stay from one epoch to the next.
        """
        if calls.missing():
            return 0
        epoch = next(reversed(counters.history), None)
        if epoch is None or not (epoch.over or epoch.batches >= _ENOUGH):
            return number
        costs = costs_of(epoch, counters.workers if number else (), counters.batch_bytes)
        if costs is None:
            return number
        if persistent and number and self.seen and self.seen[-1].workers != number:
            # The epoch in which workers start is not what they are worth: they stay, and the next one counts.
            started, self._started = self._started, number
            if started != number:
                return number
        self._started = None
        took = epoch.nanoseconds - (epoch.by_cause["start_up"] if persistent else 0)
        remember(self.seen, Seen(number, took / 1e9 / epoch.batches, costs))
        limits = machine.limits(Setting(number, prefetch, dynamic=True))
        held = limits.needed(limits.own, costs) if persistent else 0.0  # they have it already
        return decide(self.seen, replace(limits, memory_bytes=limits.memory_bytes + held))
