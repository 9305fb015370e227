"""Which setting is the best: the one rule of `diagnose`, `num_workers="auto"` and `tune`.

Pure. Settings are ordered by the seconds of a batch, as they were measured or as the model expects them, in
bands as wide as the noise of a measurement. Those of one band are equal, and the cheapest comes first: that
with the fewest workers, then that with the fewest batches ahead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from fastq_loader.insight.model import Costs, Setting, seconds_per_batch

#: Measurements of one setting differ by about as much.
NOISE = 0.03
#: A load that hardly uses a CPU may have 16 workers for each, but not more than 64: every worker is a process
#: with memory and a window of its own.
_IDLE_SHARE, _MOST_WAITING = 1 / 16, 64
#: Seconds of a batch, at least.
_SHORTEST = 1e-9


@dataclass(frozen=True)
class Limits:
    """The settings that may be chosen.

    Attributes:
        own: the loader's setting. What is not said below is as in it.
        cpus: how many CPUs all processes may use together.
        memory_bytes: for workers and the batches that they work ahead.
        most_workers: the most that there may be.
        schedules: values of `Setting.dynamic`.
        start_methods: values of `Setting.start_method`.
        prefetch: values of `Setting.prefetch_factor`, besides the own one.
        worker_bytes: memory that a worker needs besides its batches. Of the 250 MB of a spawned one half are
            shared.
        machine_bytes: memory of the machine.
    """

    own: Setting
    cpus: float
    memory_bytes: float = math.inf
    most_workers: float = math.inf
    schedules: tuple[bool, ...] = ()
    start_methods: tuple[str | None, ...] = ()
    prefetch: tuple[int, ...] = ()
    worker_bytes: float = 128 << 20
    machine_bytes: int = sys.maxsize

    def seconds(self, costs: Costs, setting: Setting) -> float:
        """The wall time that a batch takes by the model; never 0, so that it can be compared."""
        return max(seconds_per_batch(costs, setting, self.cpus, self.machine_bytes), _SHORTEST)

    def needed(self, setting: Setting, costs: Costs) -> float:
        """The bytes of memory that the workers of a setting need."""
        batches = (setting.prefetch_factor + 1) * costs.batch_bytes
        return setting.num_workers * (self.worker_bytes + batches)

    def allow(self, setting: Setting, costs: Costs) -> bool:
        """Whether there may be so many workers, and memory holds them."""
        return setting.num_workers <= self.most_workers and self.needed(setting, costs) <= self.memory_bytes

    def settings(self, costs: Costs) -> Iterator[Setting]:
        """All that may be chosen, where batches cost so much."""
        own, most = self.own, min(most_workers(costs, self.cpus), self.most_workers)
        yield replace(own, num_workers=0)
        for number, prefetch, dynamic, method in product(
            sorted({*numbers(most, self.cpus), own.num_workers} - {0}),
            sorted({*self.prefetch, own.prefetch_factor}),
            self.schedules or (own.dynamic,),
            self.start_methods or (own.start_method,),
        ):
            setting = Setting(number, prefetch, dynamic, own.fixed_window, method)
            if self.allow(setting, costs):
                yield setting


def rank(costs: Costs | None, measured: Mapping[Setting, float], limits: Limits) -> dict[Setting, float]:
    """Settings with the seconds that a batch takes, the best first: those that were measured, and all others
    that may be chosen.

    Args:
        costs: of batches, for what was not measured; None: only what was counts.
        measured: seconds that a batch took.
        limits: what may be chosen.
    """
    seconds = dict(measured)
    if costs is not None:
        expected = (each for each in limits.settings(costs) if each not in measured)
        seconds |= {each: _expected(costs, each, measured, limits) for each in expected}
    least = max(min(seconds.values(), default=0.0), _SHORTEST)

    def place(setting: Setting) -> tuple[float, ...]:
        band = math.log(max(seconds[setting] / least, 1.0)) // math.log1p(NOISE)
        return band, *price(setting, limits.own), seconds[setting]

    return {each: seconds[each] for each in sorted(seconds, key=place)}


def price(setting: Setting, own: Setting) -> tuple[int, int, bool, bool]:
    """Price of a setting: what it takes, and whether it changes more than the numbers; the least wins."""
    changed = setting.dynamic != own.dynamic, setting.start_method != own.start_method
    return setting.num_workers, setting.prefetch_factor, *changed


def _expected(costs: Costs, setting: Setting, measured: Mapping[Setting, float], limits: Limits) -> float:
    """Seconds of a batch by the model, corrected by how wrong it is for the measured setting whose number of
    workers is most like this one; no worker at all is like none."""
    workers = setting.num_workers
    known = [each for each in measured if each.num_workers and workers]
    nearest = min(known, key=lambda each: abs(math.log(each.num_workers / workers)), default=None)
    if nearest is None:
        return limits.seconds(costs, setting)
    # The more workers wait for a CPU, the more of it they seem to need. So of fewer it is not believed that
    # CPUs limit them, too: half as many would load half as much.
    if workers < nearest.num_workers:
        limits = replace(limits, cpus=math.inf)
    return measured[nearest] * limits.seconds(costs, setting) / limits.seconds(costs, nearest)


def most_workers(costs: Costs, cpus: float) -> int:
    """The most workers that can be of use: as many as keep the CPUs busy, rounded up to what is tried. It
    would rather be too few: the time that a load waits for a CPU counts as time that it uses one."""
    waiting = math.ceil(cpus / max(costs.load_cpu, _IDLE_SHARE))
    most = max(1, min(waiting, max(_MOST_WAITING, math.ceil(cpus))))
    return next(number for number in _steps(cpus) if number >= most)


def numbers(most: float, cpus: float) -> list[int]:
    """Numbers of workers to try: from 4 on each is a third or a half more than the one before. As many as
    there are CPUs is one of them."""
    return [number for number in _steps(cpus) if number <= most]


def _steps(cpus: float) -> list[int]:
    steps = {*range(1, 5), *(base << shift for base in (2, 3) for shift in range(1, 12)), math.ceil(cpus)}
    return sorted(steps)
