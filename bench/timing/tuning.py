"""`tune` and `num_workers="auto"` beside all settings that they could have chosen, measured in the same run.

First `tune` chooses, and says how long an epoch is. Then what it chose, every setting and "auto" take turns,
epoch by epoch; a setting has new workers in each. A training step is simulated by sleeping.
"""

from __future__ import annotations

import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, NamedTuple

from bench.peers import LoaderSettings
from bench.peers.torch_loader import loader_arguments
from bench.timing.processes import wait_until_quiet
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import ENDLESS, Load, Order, find_workload
from bench.workloads.slow import Naps
from fastq_loader import DataLoader, tune
from fastq_loader.insight.machine import cpus

AXIS = "insight"
TUNED, AUTO = "tune", "auto"
SCHEDULES = ROUND_ROBIN, DYNAMIC = ("round_robin", "dynamic")

OWN_WORKERS = 2  # of the loader that `tune` is given
TUNING, SHORTEST = 30.0, 1.0  # seconds of `tune` for each one of a block, and the least that it takes
MOST_ROUNDS = 3
PREFETCH = (2, 8)
USUAL_PREFETCH = PREFETCH[0]
PER_CPU, PER_CPU_WAITING, MOST = 2, 16, 64
"""Workers for each CPU, of samples that compute and of ones that sleep, and in all."""
WARM_BATCHES = 2  # for each worker
LEAST_BATCHES = 8  # of an epoch: with fewer, "auto" learns nothing from it

INLINE = "0 workers"
"""The setting without workers."""


class Tuned(NamedTuple):
    """What is loaded.

    Attributes:
        build: is given the run's folder.
        step: seconds of a training step.
        waits: samples sleep, so that there may be many workers.
    """

    description: str
    build: Callable[[Path], Load]
    step: float = 0.0
    waits: bool = False


def _of_workload(name: str, **about: Any) -> Tuned:
    workload = find_workload(name)
    step = f"; a step of {1e3 * about['step']:g} ms" if "step" in about else ""
    return Tuned(workload.description + step, workload.load, **about)


def loads() -> dict[str, Tuned]:
    """By the name of the case."""
    return {
        "csv": _of_workload("csv"),
        "jpeg": _of_workload("jpeg"),
        "sleep": Tuned("4 samples that sleep 5 ms each", lambda folder: Load(Naps(0.005, 1), 4), waits=True),
        "heavy_tail": _of_workload("heavy_tail", waits=True),
        "step": _of_workload("jpeg", step=0.2),
    }


class Setting(NamedTuple):
    """One that is tried."""

    num_workers: int
    prefetch_factor: int = USUAL_PREFETCH
    schedule: str = DYNAMIC

    def __str__(self) -> str:
        return named(*self)

    @property
    def fixed(self) -> bool:
        """Whether it is one that `num_workers="auto"` could come to."""
        return not self.num_workers or self[1:] == (USUAL_PREFETCH, DYNAMIC)


def named(num_workers: int, prefetch_factor: int = 0, schedule: str = "") -> str:
    """Arguments of a loader, in words."""
    workers = f"{num_workers} worker{'s' * (num_workers > 1)}"
    return f"{workers}, prefetch {prefetch_factor}, {schedule}" if num_workers else INLINE


def settings(machine_cpus: float, waits: bool) -> list[Setting]:
    """All that are tried, those with most workers first."""
    most = min(MOST, ceil(machine_cpus) * (PER_CPU_WAITING if waits else PER_CPU))
    numbers = [most, *(1 << power for power in reversed(range((most - 1).bit_length())))]
    found = [Setting(number, ahead, how) for number in numbers for ahead in PREFETCH for how in SCHEDULES]
    return [*found, Setting(0)]


@dataclass
class Race:
    """What the lanes of a case know of each other.

    Attributes:
        seconds: of a block, as the run asks for it.
        batches: in an epoch.
    """

    load: Load
    step: float
    start_method: str
    seconds: float
    batches: int = LEAST_BATCHES


@dataclass(eq=False, kw_only=True)
class EpochLane(Lane):
    """A loader, whose workers live until `close`. A block is an epoch."""

    race: Race

    def block(self, part: str) -> list[Row]:
        return [self.epoch(self.race.batches)]

    def open(self, loader: DataLoader[Any], order: Order) -> None:
        """Take a loader for the blocks."""
        self._loader, self._order = loader, order
        self.closing.callback(loader.close)

    def make(self, workers: int, prefetch: int = USUAL_PREFETCH, **arguments: Any) -> None:
        """Make one."""
        load, settings = self.race.load, LoaderSettings(workers, self.race.start_method, prefetch)
        order = Order(len(load.dataset), ENDLESS)  # type: ignore[arg-type]
        usual = loader_arguments(load, settings)
        self.open(DataLoader(**usual | {"sampler": order} | arguments), order)

    def epoch(self, batches: int) -> Row:
        """Iterate an epoch of so many batches."""
        self._order.samples = batches * self.race.load.batch_size
        began = time.monotonic()
        for _ in self._loader:
            if self.race.step:
                time.sleep(self.race.step)
        took, workers = time.monotonic() - began, int(self._loader.num_workers)
        return {"batches": batches, "seconds": took, "num_workers": workers}

    def warm_up(self) -> None:
        """Start the workers, all of them; nothing is trained meanwhile."""
        self._order.samples = WARM_BATCHES * max(1, self._loader.num_workers) * self.race.load.batch_size
        for _ in self._loader:
            continue
        wait_until_quiet()  # some may be late: with a dynamic schedule, others load meanwhile

    def close(self) -> None:
        super().close()
        vars(self).pop("_loader", None)


class TunedLane(EpochLane):
    """What `tune` chooses; also says how long an epoch is."""

    def start(self) -> None:
        race = self.race
        self.make(OWN_WORKERS)
        tuned = tune(self._loader, race.step, max(SHORTEST, TUNING * race.seconds), progress=False)
        race.batches = max(LEAST_BATCHES, round(tuned.rows[0].batches_per_second * race.seconds))
        self.label = f"tune: {named(*tuned.settings.values())}"
        self._chosen = tuned.settings
        self.open(tuned.loader, self._order)
        self.warm_up()

    def finish(self) -> Row:
        return self._chosen


class AutoLane(EpochLane):
    """`num_workers="auto"`, from its third epoch on."""

    def start(self) -> None:
        self.make(OWN_WORKERS, num_workers="auto", schedule=DYNAMIC)
        self._numbers = [self.epoch(self.race.batches)["num_workers"] for _ in range(2)]

    def block(self, part: str) -> list[Row]:
        rows = super().block(part)
        self._numbers.append(rows[0]["num_workers"])
        return rows

    def finish(self) -> Row:
        return {"label": f"auto: {', '.join(map(str, self._numbers))} workers"}


@dataclass(eq=False, kw_only=True)
class SettingLane(EpochLane):
    """One setting, whose workers live for a block: those of all settings together would be hundreds."""

    setting: Setting

    def block(self, part: str) -> list[Row]:
        workers, prefetch, schedule = self.setting
        try:
            self.make(workers, prefetch, schedule=schedule)
            self.warm_up()
            return super().block(part)
        finally:
            self.close()

    def finish(self) -> Row:
        return {**self.setting._asdict(), "fixed": self.setting.fixed}


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """One for each of the loads."""
    for name, tuned in loads().items():
        rounds = min(options.blocks, MOST_ROUNDS)
        plan = partial(_plan, name, tuned, options, folder)
        yield Case(AXIS, f"tune_{name}", OWN_WORKERS, options.start_method, rounds, plan)


def _plan(name: str, tuned: Tuned, options: Namespace, folder: Path) -> Plan:
    race = Race(tuned.build(folder), tuned.step, options.start_method, options.seconds)
    seconds, tried = options.seconds, settings(cpus(), tuned.waits)
    lanes = [SettingLane(str(each), str(each), seconds, race=race, setting=each) for each in tried]
    first, last = TunedLane(TUNED, TUNED, seconds, race=race), AutoLane(AUTO, AUTO, seconds, race=race)
    return Plan({"description": tuned.description, "step": tuned.step}, [first, *lanes, last])
