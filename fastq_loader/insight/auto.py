"""`num_workers="auto"`: how many workers the next epoch gets.

`decide` is pure; the rest runs in the consumer, when an epoch begins. The first epoch gets as many workers as
there are CPUs. What it cost tells the model what every other number is worth. The model knows neither the
caches nor what a start of workers costs. So a number that was seen is worth what was measured, and what the
model says of another one is corrected by how wrong it is for the nearest.

Fewer workers win among equals, and more must promise a gain that is larger than the noise: two equal numbers
do not take turns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from fastq_loader.insight import machine
from fastq_loader.insight.model import (
    NOISE,
    Costs,
    Setting,
    costs_of,
    most_workers,
    numbers,
    seconds_per_batch,
)
from fastq_loader.memory import arena
from fastq_loader.statistics.counters import Counters
from fastq_loader.workers.kinds import Auto

#: The gain that more workers must promise.
_GAIN = 0.05
#: Workers of the first epoch, at most: it has to show what a batch costs, and memory may be short.
_MOST_AT_FIRST = 8
#: Batches of an epoch that was broken off, from which it counts.
_ENOUGH = 16
#: Epochs that are remembered of each number of workers.
_REMEMBERED = 3
#: Memory that a worker is taken to need besides its batches (of the 250 MB of a spawned one half are shared),
#: and the part of what is left that all may take.
_WORKER_BYTES, _MEMORY_SHARE = 128 << 20, 0.8


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


def decide(seen: Sequence[Seen], cpus: float, most: float, prefetch: int) -> int:
    """How many workers the next epoch gets.

    Args:
        seen: epochs, the newest last; at least one.
        cpus: how many CPUs all processes may use together.
        most: the workers that memory allows.
        prefetch: batches that each works ahead.
    """
    now = seen[-1].workers
    costs = _with_transport(seen)
    bound = int(min(most, most_workers(costs, cpus)))
    candidates = {0, *numbers(bound, cpus), *(epoch.workers for epoch in seen if epoch.workers <= most)}

    def expected(workers: int, costs: Costs = costs, cpus: float = cpus) -> float:
        return seconds_per_batch(costs, Setting(workers, prefetch, dynamic=True), cpus)

    def guessed(workers: int) -> float:
        """What the model says, corrected by how wrong it is for the number that is most like this one; no
        worker at all is like none."""
        # The more workers wait for a CPU, the more of it they seem to need. So of fewer it is not believed
        # that CPUs limit them, too: half as many would load half as much.
        limit = cpus if workers >= now else math.inf
        others = [each for each in known if each and workers]
        if not others:
            return expected(workers, cpus=limit)
        nearest = min(others, key=lambda each: abs(math.log(each / workers)))
        return expected(workers, cpus=limit) * known[nearest] / expected(nearest, cpus=limit)

    measured: dict[int, list[float]] = {}
    for epoch in seen:  # with the step as it is now
        change = 1.0
        if abs(epoch.costs.step - costs.step) > epoch.seconds * NOISE:
            then = replace(epoch.costs, step=costs.step, step_cpu=costs.step_cpu)
            change = expected(epoch.workers, then) / expected(epoch.workers, epoch.costs)
        measured.setdefault(epoch.workers, []).append(epoch.seconds * change)
    known = {workers: fmean(each) for workers, each in measured.items()}
    seconds = {workers: known.get(workers) or guessed(workers) for workers in candidates}
    least = min(seconds.values())
    fewest = min(workers for workers in candidates if seconds[workers] <= least * (1 + NOISE))
    if fewest > now and seconds.get(now, math.inf) <= least * (1 + _GAIN):
        return now
    return fewest


def _with_transport(seen: Sequence[Seen]) -> Costs:
    """The newest costs. An epoch without workers does not tell what they add, so an older one does."""
    newest = seen[-1].costs
    of = next((epoch.costs for epoch in reversed(seen) if epoch.workers), newest)
    return replace(newest, pack=of.pack, overhead=of.overhead, load_cpu=of.load_cpu)


# ---- what a loader asks --------------------------------------------------------------------------


def given(num_workers: Any) -> Any:
    """What the argument `num_workers` means: for "auto", the workers of the first epoch.

    Raises:
        ValueError: it is another string.
    """
    if not isinstance(num_workers, str):
        return num_workers
    if num_workers != "auto":
        raise ValueError(f"num_workers={num_workers!r} is unknown: use a number of workers, or 'auto'")
    return Auto(min(math.ceil(machine.cpus()), _MOST_AT_FIRST) if arena.AVAILABLE else 0)


class Chooser:
    """What is remembered of a loader's epochs, to choose how many workers the next one gets.

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
        epoch = next(reversed(counters.history), None)
        if epoch is None or not (epoch.over or epoch.batches >= _ENOUGH) or not arena.AVAILABLE:
            return number
        costs = costs_of(epoch, counters.workers if number else ())
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
        each = _WORKER_BYTES + (prefetch + 1) * counters.bytes / max(1, counters.batches)
        held = number if persistent else 0  # their memory is used already
        most = held + machine.memory_bytes() * _MEMORY_SHARE / machine.ranks() // each
        return decide(self.seen, machine.cpus(), most, prefetch)
