"""The cases of the schedule: which batches, by which loaders, with which arguments, and what is wanted.

What the numbers are: the goals that this project set itself for loading in order without stalling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from bench import costs
from bench.costs import NO_STEP, Step, TracedSamples
from bench.results import BOUND, Goal
from bench.workloads import find_workload
from fastq_loader import Dynamic


@dataclass(frozen=True)
class Variant:
    """A contender: the peer whose loader it is, and the arguments that make it this one."""

    label: str
    peer: str
    arguments: dict[str, Any]

    @property
    def in_order(self) -> bool:
        return bool(self.arguments.get("in_order", True))


_DYNAMIC = {"schedule": "dynamic"}
VARIANTS = {
    "torch": Variant("torch", "torch", {}),
    "torch_unordered": Variant("torch, in_order=False", "torch", {"in_order": False}),
    "round_robin": Variant("fastq_loader, round_robin", "fastq_loader", {}),
    "dynamic": Variant("fastq_loader, dynamic", "fastq_loader", _DYNAMIC),
    "dynamic_32": Variant(
        "fastq_loader, dynamic, window=32", "fastq_loader", {"schedule": Dynamic(window=32)}
    ),
    "dynamic_unordered": Variant(
        "fastq_loader, dynamic, in_order=False", "fastq_loader", _DYNAMIC | {"in_order": False}
    ),
}


@dataclass(frozen=True)
class Case:
    """Batches, and who is to load them.

    Attributes:
        build: makes the dataset; `TracedSamples` tell what took place, of others only the time is known.
        samples: in an epoch.
        picture: keep what took place, for a picture.
        most_rounds: where an epoch takes long; None is as many as are asked for.
    """

    name: str
    description: str
    build: Callable[[], Dataset[Any]]
    samples: int
    batch_size: int
    workers: int
    contenders: tuple[str, ...]
    goal: Goal
    step: Step = NO_STEP
    picture: bool = False
    most_rounds: int | None = None

    @property
    def batches(self) -> int:
        return self.samples // self.batch_size


# Every eighth item is worker 0's where batch k is worker k mod 4's.
SLOW_S, FAST_S, PERIOD, ITEMS = 0.24, 0.03, 8, 64
# 128 batches keep 4 workers busy for 3 s.
MEDIAN_S, SIGMA, TAIL_BATCHES, TAIL_BATCH = 0.0065, 1.0, 128, 8
# Loading and steps take about as long. Twice as many batches, so that what nobody can avoid weighs less: no
# step before the first 8 batches are there, and the last step after all have been loaded.
STEP, STEP_BATCHES, STEP_ROUNDS = Step(seconds=0.2, every=8), 2 * TAIL_BATCHES, 3
UNIFORM_S, UNIFORM_ITEMS = 0.01, 256
SMALL_BATCHES = 6000  # a second or two of messages


def _stalls() -> TracedSamples:
    return TracedSamples(costs.every(PERIOD, SLOW_S, FAST_S, ITEMS))


def _tail(batches: int) -> TracedSamples:
    return TracedSamples(costs.log_normal(MEDIAN_S, SIGMA, batches * TAIL_BATCH))


def _uniform() -> TracedSamples:
    return TracedSamples([UNIFORM_S] * UNIFORM_ITEMS)


def cases() -> list[Case]:
    """All of them, in the order of the report."""
    costs_ms = f"log-normal, median {1e3 * MEDIAN_S:g} ms, sigma {SIGMA:g}"
    everybody = ("torch", "torch_unordered", "dynamic_32", "dynamic")
    return [
        Case(
            "stalls",
            f"{ITEMS} batches of one sample that sleeps {FAST_S} s, every {PERIOD}th {SLOW_S} s",
            _stalls,
            samples=ITEMS,
            batch_size=1,
            workers=4,
            contenders=("torch", "torch_unordered", "round_robin", "dynamic"),
            goal=Goal("dynamic", 1.2, BOUND),
            picture=True,
        ),
        Case(
            "tail",
            f"{TAIL_BATCHES} batches of {TAIL_BATCH} samples that sleep: {costs_ms}",
            partial(_tail, TAIL_BATCHES),
            samples=TAIL_BATCHES * TAIL_BATCH,
            batch_size=TAIL_BATCH,
            workers=4,
            contenders=(*everybody, "dynamic_unordered"),
            goal=Goal("dynamic_32", 1.15, "torch_unordered"),
        ),
        Case(
            "steps",
            f"{STEP_BATCHES} such batches, {1e3 * STEP.seconds:g} ms of pure Python after every {STEP.every}",
            partial(_tail, STEP_BATCHES),
            samples=STEP_BATCHES * TAIL_BATCH,
            batch_size=TAIL_BATCH,
            workers=4,
            contenders=everybody,
            goal=Goal("dynamic_32", 1.1, BOUND),
            step=STEP,
            most_rounds=STEP_ROUNDS,
        ),
        Case(
            "uniform",
            f"{UNIFORM_ITEMS} batches of one sample that sleeps {UNIFORM_S} s",
            _uniform,
            samples=UNIFORM_ITEMS,
            batch_size=1,
            workers=4,
            contenders=("torch", "round_robin", "dynamic"),
            goal=Goal("dynamic", 1.0, "round_robin"),
        ),
        *(_small(name) for name in ("rows", "tokens")),
    ]


def _small(name: str) -> Case:
    """Batches of a workload that are made in no time: what the messages cost."""
    workload = find_workload(name)
    batch_size = workload.build(Path()).batch_size
    return Case(
        name,
        f"{SMALL_BATCHES} batches: {workload.description}",
        lambda: workload.build(Path()).dataset,
        samples=SMALL_BATCHES * batch_size,
        batch_size=batch_size,
        workers=2,
        contenders=("round_robin", "dynamic"),
        goal=Goal("dynamic", 1.0, "round_robin"),
    )


def bound(case: Case, dataset: Dataset[Any]) -> tuple[float | None, str, float | None]:
    """Seconds that nobody can do without, what they are, and those of a list schedule; None: not known."""
    if not isinstance(dataset, TracedSamples):
        return None, "", None
    batches = costs.of_batches(dataset.costs, case.batch_size)
    ideal = costs.ideal(batches, case.workers)
    loading = f"sum of costs / {case.workers}"
    listed = costs.list_schedule(batches, case.workers, case.step)
    if case.step == NO_STEP:
        return ideal, loading, listed
    return max(case.step.total(case.batches), ideal), f"max(steps, {loading})", listed
