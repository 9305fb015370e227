"""Ranks settings: the one rule of `diagnose`, `num_workers="auto"` and `tune`.

Pure. Settings are ordered by the seconds of a batch, measured or expected by the model, in bands as wide as
the noise of a measurement. Within a band all settings are equal, and the cheapest comes first: the one with
the fewest workers, then the one with the fewest batches ahead.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from fastq_loader.extras.insight.model import Costs, Setting, seconds_per_batch

#: Relative difference between measurements of one setting.
NOISE = 0.03
#: A load that hardly uses a CPU may have 16 workers per CPU, but not more than 64 in all: every worker is a
#: process with memory and a window of its own.
_IDLE_SHARE, _MOST_WAITING = 1 / 16, 64
#: Minimum seconds of a batch.
_SHORTEST = 1e-9


@dataclass(frozen=True)
class Limits:
    """The settings to choose from.

    Attributes:
        own: the loader's setting, which supplies all values not listed below.
        cpus: number of CPUs that all processes may use together.
        memory_bytes: memory for workers and the batches that they load ahead.
        most_workers: maximum number of workers.
        schedules: values of `Setting.dynamic`.
        start_methods: values of `Setting.start_method`.
        prefetch: values of `Setting.prefetch_factor`, besides the own one.
        worker_bytes: memory that a worker needs besides its batches. A spawned one has 250 MB, of which half
            are shared.
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
        """Wall time of a batch according to the model; never 0, so that it can be a divisor."""
        return max(seconds_per_batch(costs, setting, self.cpus, self.machine_bytes), _SHORTEST)

    def needed(self, setting: Setting, costs: Costs) -> float:
        """Bytes of memory that the workers of a setting need."""
        batches = (setting.prefetch_factor + 1) * costs.batch_bytes
        return setting.num_workers * (self.worker_bytes + batches)

    def allow(self, setting: Setting, costs: Costs) -> bool:
        """Whether the number of workers is allowed, and their memory available."""
        return setting.num_workers <= self.most_workers and self.needed(setting, costs) <= self.memory_bytes

    def settings(self, costs: Costs) -> Iterator[Setting]:
        """All settings to choose from, for batches with these costs."""
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
    """Settings with the seconds of a batch, the best first: all that were measured, and all others to
    choose from.

    Args:
        costs: of batches, to estimate settings that were not measured; None leaves these out.
        measured: measured seconds of a batch.
        limits: settings to choose from.
    """
    seconds = dict(measured)
    if costs is not None:
        expected = (each for each in limits.settings(costs) if each not in measured)
        seconds |= {each: _expected(costs, each, measured, limits) for each in expected}
    least = max(min(seconds.values(), default=0.0), _SHORTEST)

    def rank_key(setting: Setting) -> tuple[float, ...]:
        band = math.log(max(seconds[setting] / least, 1.0)) // math.log1p(NOISE)
        return band, *price(setting, limits.own), seconds[setting]

    return {each: seconds[each] for each in sorted(seconds, key=rank_key)}


def price(setting: Setting, own: Setting) -> tuple[int, int, bool, bool]:
    """Price of a setting, lowest first: its workers, batches ahead, a change of schedule or start method."""
    changed = setting.dynamic != own.dynamic, setting.start_method != own.start_method
    return setting.num_workers, setting.prefetch_factor, *changed


def _expected(costs: Costs, setting: Setting, measured: Mapping[Setting, float], limits: Limits) -> float:
    """Seconds of a batch by the model, corrected by its error for the measured setting with the most similar
    number of workers. There is no correction from or to a setting without workers."""
    workers = setting.num_workers
    known = [each for each in measured if each.num_workers and workers]
    nearest = min(known, key=lambda each: abs(math.log(each.num_workers / workers)), default=None)
    if nearest is None:
        return limits.seconds(costs, setting)
    # Workers that compete for CPUs appear to need more CPU time. So fewer workers are not assumed to be
    # limited by the CPUs: half as many would load half as much.
    if workers < nearest.num_workers:
        limits = replace(limits, cpus=math.inf)
    return measured[nearest] * limits.seconds(costs, setting) / limits.seconds(costs, nearest)


def most_workers(costs: Costs, cpus: float) -> int:
    """Maximum useful number of workers: enough to keep the CPUs busy, rounded up to one of `numbers`. Errs on
    the low side, because the time that a load waits for a CPU counts as CPU time."""
    waiting = math.ceil(cpus / max(costs.load_cpu, _IDLE_SHARE))
    most = max(1, min(waiting, max(_MOST_WAITING, math.ceil(cpus))))
    return next(number for number in numbers(math.inf, cpus) if number >= most)


def numbers(most: float, cpus: float) -> list[int]:
    """Numbers of workers to try: from 4 on, each is a third or a half larger than the previous one. The
    number of CPUs is one of them."""
    steps = {*range(1, 5), *(base << shift for base in (2, 3) for shift in range(1, 12)), math.ceil(cpus)}
    return sorted(number for number in steps if number <= most)
