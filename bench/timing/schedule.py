"""Order without the stall: whole epochs of the same batches, by loaders that differ in who loads which one.

What a loader delivers is compared with what it was asked for: every batch once, and in order where order is
promised. Each case has a goal that this project set itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset

import fastq_loader
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import Order, find_workload, slow
from bench.workloads.slow import END, INDEX, NO_STEP, START, Step, TracedSamples
from fastq_loader import Dynamic

WARM_BATCHES = 4  # for each worker, before the first epoch
BOUND = "bound"
"""What a goal is in multiples of, if it is no contender."""
OURS = ("round_robin", "dynamic")


class Contender(NamedTuple):
    """A loader: whose it is, and the arguments that make it this one."""

    label: str
    peer: str
    arguments: dict[str, Any]


_UNORDERED: dict[str, Any] = {"in_order": False}
CONTENDERS = {
    "torch": Contender("torch", "torch", {}),
    "torch_unordered": Contender("torch, in_order=False", "torch", _UNORDERED),
    "round_robin": Contender("fastq_loader, round robin", "fastq_loader", {}),
    "dynamic": Contender("fastq_loader, dynamic", "fastq_loader", {"schedule": "dynamic"}),
    "dynamic_32": Contender(
        "fastq_loader, dynamic, window=32", "fastq_loader", {"schedule": Dynamic(window=32)}
    ),
    "dynamic_unordered": Contender(
        "fastq_loader, dynamic, in_order=False", "fastq_loader", {"schedule": "dynamic"} | _UNORDERED
    ),
}


class Goal(NamedTuple):
    """An epoch of the contender `of` is to take at most `times` as long as one of `base`: a contender's
    name, or `BOUND`."""

    of: str
    times: float
    base: str


@dataclass(frozen=True)
class ScheduleCase:
    """Batches, and who is to load them.

    Attributes:
        build: makes the dataset; `TracedSamples` tell what took place, of others only the time is known.
        batches: in an epoch.
        most_rounds: where an epoch takes long.
    """

    name: str
    description: str
    build: Callable[[], Dataset[Any]]
    batches: int
    batch_size: int
    contenders: tuple[str, ...]
    goal: Goal
    workers: int = 4
    step: Step = NO_STEP
    most_rounds: int = 1000

    @property
    def samples(self) -> int:
        """In an epoch."""
        return self.batches * self.batch_size


# Every eighth item is worker 0's where batch k is worker k mod 4's.
SLOW_S, FAST_S, PERIOD, ITEMS = 0.24, 0.03, 8, 64
# 128 batches keep 4 workers busy for 3 s.
MEDIAN_S, SIGMA, TAIL_BATCHES, TAIL_BATCH = 0.0065, 1.0, 128, 8
# Loading and steps take about as long. There are twice as many batches, so that what nobody can avoid weighs
# less: no step before the first 8 batches are there, and the last step after all have been loaded.
STEP, STEP_BATCHES, STEP_ROUNDS = Step(seconds=0.2, every=8), 2 * TAIL_BATCHES, 3
UNIFORM_S, UNIFORM_ITEMS = 0.01, 256
SMALL_BATCHES = 6000  # a second or two of messages


def schedule_cases() -> list[ScheduleCase]:
    """All of them, in the order of the report."""

    def tail() -> TracedSamples:
        return TracedSamples(slow.log_normal(MEDIAN_S, SIGMA, STEP_BATCHES * TAIL_BATCH))

    def stalls() -> TracedSamples:
        return TracedSamples([FAST_S if index % PERIOD else SLOW_S for index in range(ITEMS)])

    def uniform() -> TracedSamples:
        return TracedSamples([UNIFORM_S] * UNIFORM_ITEMS)

    both, all_four = ("torch", "torch_unordered"), ("torch", "torch_unordered", "dynamic_32", "dynamic")
    one = "batches of one sample that sleeps"
    about = f"{ITEMS} {one} {FAST_S} s, every {PERIOD}th {SLOW_S} s"
    goal = Goal("dynamic", 1.2, BOUND)
    cases = [ScheduleCase("stalls", about, stalls, ITEMS, 1, (*both, *OURS), goal)]
    sleeps = f"samples that sleep: log-normal, median {1e3 * MEDIAN_S:g} ms, sigma {SIGMA:g}"
    about = f"{TAIL_BATCHES} batches of {TAIL_BATCH} {sleeps}"
    names, goal = (*all_four, "dynamic_unordered"), Goal("dynamic_32", 1.15, "torch_unordered")
    cases.append(ScheduleCase("tail", about, tail, TAIL_BATCHES, TAIL_BATCH, names, goal))
    about = f"{STEP_BATCHES} such batches, {1e3 * STEP.seconds:g} ms of pure Python after every {STEP.every}"
    goal, steps = (
        Goal("dynamic_32", 1.1, BOUND),
        dict[str, Any]() | {"step": STEP, "most_rounds": STEP_ROUNDS},
    )
    cases.append(ScheduleCase("steps", about, tail, STEP_BATCHES, TAIL_BATCH, all_four, goal, **steps))
    about, even = f"{UNIFORM_ITEMS} {one} {UNIFORM_S} s", Goal("dynamic", 1.0, "round_robin")
    cases.append(ScheduleCase("uniform", about, uniform, UNIFORM_ITEMS, 1, ("torch", *OURS), even))
    for name in ("rows", "tokens"):  # made in no time: what the messages cost
        workload = find_workload(name)
        load = workload.build(Path())
        about = f"{SMALL_BATCHES} batches: {workload.description}"
        build = partial(getattr, load, "dataset")
        cases.append(ScheduleCase(name, about, build, SMALL_BATCHES, load.batch_size, OURS, even, workers=2))
    return cases


def bound(case: ScheduleCase, dataset: Dataset[Any]) -> tuple[float | None, str]:
    """Seconds that nobody can do without, and what they are; None: not known."""
    if not isinstance(dataset, TracedSamples):
        return None, ""
    batches = slow.of_batches(dataset.costs[: case.samples], case.batch_size)
    ideal, loading = slow.ideal(batches, case.workers), f"sum of costs / {case.workers}"
    if case.step == NO_STEP:
        return ideal, loading
    return max(case.batches // case.step.every * case.step.seconds, ideal), f"max(steps, {loading})"


@dataclass(eq=False, kw_only=True)
class ScheduleLane(Lane):
    """One contender's loader, whose workers live until `close`."""

    case: ScheduleCase
    dataset: Dataset[Any]
    start_method: str

    def start(self) -> None:
        contender = CONTENDERS[self.peer]
        self._order = Order()
        self._ours = contender.peer == "fastq_loader"
        make: Any = fastq_loader.DataLoader if self._ours else TorchDataLoader
        self._loader: Any = make(
            self.dataset,
            self.case.batch_size,
            sampler=self._order,
            num_workers=self.case.workers,
            persistent_workers=True,
            multiprocessing_context=self.start_method,
            **contender.arguments,
        )
        if self._ours:
            self.closing.callback(self._loader.close)
        few = min(WARM_BATCHES * self.case.workers, self.case.batches)  # start the workers
        self._order.samples = few * self.case.batch_size
        for _ in self._loader:
            pass

    def block(self, part: str) -> list[Row]:
        case, traced = self.case, isinstance(self.dataset, TracedSamples)
        self._order.samples = case.samples
        before = self._loader.statistics() if self._ours else None
        batches, delivered, waited = [], 0, 0.0
        began = time.monotonic()
        iterator = iter(self._loader)
        asked = time.monotonic()
        for batch in iterator:
            waited += time.monotonic() - asked
            delivered += 1
            if traced:
                batches.append(batch)
            if case.step.seconds and delivered % case.step.every == 0:
                _hold_the_gil(case.step.seconds)
            asked = time.monotonic()
        if delivered != case.batches:
            raise RuntimeError(f"gave {delivered} of {case.batches} batches")
        row: Row = {"batches": delivered, "seconds": asked - began, "waited": waited}
        if traced:
            work = torch.stack(batches)
            self._check(work[..., INDEX].flatten().tolist())
            row["worked"] = float((work[..., END] - work[..., START]).sum())
        if before is not None:
            after = self._loader.statistics()
            row["head_of_line"] = after.head_of_line_seconds - before.head_of_line_seconds
            row["window"] = after.window
        return [row]

    def close(self) -> None:
        super().close()
        self._loader = None  # torch's workers end with the last reference

    def _check(self, indices: list[float]) -> None:
        expected = list(range(self.case.samples))
        if sorted(indices) != expected:
            raise RuntimeError("batches were lost, or came twice")
        if CONTENDERS[self.peer].arguments.get("in_order", True) and indices != expected:
            raise RuntimeError("batches came in another order than the sampler's")


def case(each: ScheduleCase, peers: Sequence[str], start_method: str, blocks: int) -> Case:
    """The contenders of a case that are the loaders of these peers."""
    names = [name for name in each.contenders if CONTENDERS[name].peer in peers]

    def plan() -> Plan:
        dataset = each.build()
        seconds, bounded_by = bound(each, dataset)
        facts: Row = {"description": each.description, "batches": each.batches, "goal": each.goal._asdict()}
        facts |= {"bound": seconds, "bounded_by": bounded_by}
        common: dict[str, Any] = {"case": each, "dataset": dataset, "start_method": start_method}
        return Plan(facts, [ScheduleLane(name, CONTENDERS[name].label, **common) for name in names])

    return Case("schedule", each.name, each.workers, start_method, min(blocks, each.most_rounds), plan)


def _hold_the_gil(seconds: float) -> None:
    """A training step in pure Python."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
