"""The cases of the schedule: which batches, by which loaders, and the goals that this project set itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from bench.workloads import find_workload, slow
from bench.workloads.slow import NO_STEP, Step, TracedSamples
from fastq_loader import Dynamic

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
        picture: keep what took place, for a picture.
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
    picture: bool = False
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
    cases = [ScheduleCase("stalls", about, stalls, ITEMS, 1, (*both, *OURS), goal, picture=True)]
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


def bound(case: ScheduleCase, dataset: Dataset[Any]) -> tuple[float | None, str, float | None]:
    """Seconds that nobody can do without, what they are, and those of a list schedule; None: not known."""
    if not isinstance(dataset, TracedSamples):
        return None, "", None
    batches = slow.of_batches(dataset.costs[: case.samples], case.batch_size)
    ideal, loading = slow.ideal(batches, case.workers), f"sum of costs / {case.workers}"
    listed = slow.list_schedule(batches, case.workers, case.step)
    if case.step == NO_STEP:
        return ideal, loading, listed
    steps = case.batches // case.step.every * case.step.seconds
    return max(steps, ideal), f"max(steps, {loading})", listed
