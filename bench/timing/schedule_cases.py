"""The cases of the schedule: which batches, by which loaders, and the goals that this project set itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from bench.workloads import Load, find_workload, slow
from bench.workloads.slow import NO_STEP, Step, TracedSamples
from fastq_loader import Dynamic

BOUND = "bound"
"""What a goal is in multiples of, if it is no contender."""
_OURS = "fastq_loader"
OURS = ("round_robin", "dynamic")


class Contender(NamedTuple):
    """A loader: whose it is, and the arguments that make it this one."""

    label: str
    peer: str
    arguments: dict[str, Any]

    @property
    def in_order(self) -> bool:
        return bool(self.arguments.get("in_order", True))


CONTENDERS = {
    "torch": Contender("torch", "torch", {}),
    "torch_unordered": Contender("torch, in_order=False", "torch", {"in_order": False}),
    "round_robin": Contender(f"{_OURS}, round robin", _OURS, {}),
    "dynamic": Contender(f"{_OURS}, dynamic", _OURS, {"schedule": "dynamic"}),
    "dynamic_32": Contender(f"{_OURS}, dynamic, window=32", _OURS, {"schedule": Dynamic(window=32)}),
    "dynamic_unordered": Contender(
        f"{_OURS}, dynamic, in_order=False", _OURS, {"schedule": "dynamic", "in_order": False}
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
        most_rounds: where an epoch takes long; None is as many as are asked for.
    """

    name: str
    description: str
    build: Callable[[], Dataset[Any]]
    batches: int
    batch_size: int
    workers: int
    contenders: tuple[str, ...]
    goal: Goal
    step: Step = NO_STEP
    picture: bool = False
    most_rounds: int | None = None

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


def _stalls() -> TracedSamples:
    return TracedSamples(slow.every(PERIOD, SLOW_S, FAST_S, ITEMS))


def _tail() -> TracedSamples:
    return TracedSamples(slow.log_normal(MEDIAN_S, SIGMA, STEP_BATCHES * TAIL_BATCH))


def _uniform() -> TracedSamples:
    return TracedSamples([UNIFORM_S] * UNIFORM_ITEMS)


def schedule_cases() -> list[ScheduleCase]:
    """All of them, in the order of the report."""
    both, all_four = ("torch", "torch_unordered"), ("torch", "torch_unordered", "dynamic_32", "dynamic")
    stalls = f"{ITEMS} batches of one sample that sleeps {FAST_S} s, every {PERIOD}th {SLOW_S} s"
    sleeps = f"samples that sleep: log-normal, median {1e3 * MEDIAN_S:g} ms, sigma {SIGMA:g}"
    tail = f"{TAIL_BATCHES} batches of {TAIL_BATCH} {sleeps}"
    steps = f"{STEP_BATCHES} such batches, {1e3 * STEP.seconds:g} ms of pure Python after every {STEP.every}"
    uniform = f"{UNIFORM_ITEMS} batches of one sample that sleeps {UNIFORM_S} s"
    unordered, even = Goal("dynamic_32", 1.15, "torch_unordered"), Goal("dynamic", 1.0, "round_robin")
    cases = [
        ScheduleCase(
            "stalls", stalls, _stalls, ITEMS, 1, 4, (*both, *OURS), Goal("dynamic", 1.2, BOUND), picture=True
        ),
        ScheduleCase(
            "tail", tail, _tail, TAIL_BATCHES, TAIL_BATCH, 4, (*all_four, "dynamic_unordered"), unordered
        ),
        ScheduleCase(
            "steps",
            steps,
            _tail,
            STEP_BATCHES,
            TAIL_BATCH,
            4,
            all_four,
            Goal("dynamic_32", 1.1, BOUND),
            STEP,
            most_rounds=STEP_ROUNDS,
        ),
        ScheduleCase("uniform", uniform, _uniform, UNIFORM_ITEMS, 1, 4, ("torch", *OURS), even),
    ]
    for name in ("rows", "tokens"):  # made in no time: what the messages cost
        workload = find_workload(name)
        load = workload.build(Path())
        about = f"{SMALL_BATCHES} batches: {workload.description}"
        cases.append(
            ScheduleCase(name, about, partial(_dataset, load), SMALL_BATCHES, load.batch_size, 2, OURS, even)
        )
    return cases


def _dataset(load: Load) -> Dataset[Any]:
    return load.dataset


def bound(case: ScheduleCase, dataset: Dataset[Any]) -> tuple[float | None, str, float | None]:
    """Seconds that nobody can do without, what they are, and those of a list schedule; None: not known."""
    if not isinstance(dataset, TracedSamples):
        return None, "", None
    batches = slow.of_batches(dataset.costs[: case.samples], case.batch_size)
    ideal = slow.ideal(batches, case.workers)
    loading = f"sum of costs / {case.workers}"
    listed = slow.list_schedule(batches, case.workers, case.step)
    if case.step == NO_STEP:
        return ideal, loading, listed
    return max(case.step.total(case.batches), ideal), f"max(steps, {loading})", listed
