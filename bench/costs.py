"""Samples that cost what a list says, and how soon that many workers could have them all.

A cost is a sleep, which stands for the latency of a disk or an object store: what is measured is who waits
for whom, not how many cores are free. A sample tells who made it and when, so that a picture of an epoch
shows what took place.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

INDEX, WORKER, START, END = range(4)
"""Columns of a sample."""


@dataclass(frozen=True)
class Step:
    """What the consumer does with the GIL held: `seconds` of pure Python after every `every` batches."""

    seconds: float
    every: int

    def total(self, batches: int) -> float:
        """Seconds of an epoch of so many batches."""
        return batches // self.every * self.seconds


NO_STEP = Step(0.0, 1)


class TracedSamples(Dataset[Tensor]):
    """`dataset[i]` is float64[4] after sleeping for `costs[i]` seconds: `i`, the worker's number, and the
    readings of `time.monotonic` before and after, which all processes of a machine share."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.costs = list(costs)

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, index: int) -> Tensor:
        worker = get_worker_info()
        start = time.monotonic()
        if self.costs[index]:
            time.sleep(self.costs[index])
        numbers = (index, -1 if worker is None else worker.id, start, time.monotonic())
        return torch.tensor(numbers, dtype=torch.float64)


def every(period: int, slow: float, fast: float, samples: int) -> list[float]:
    """Seconds of each sample: the first of every `period` is slow."""
    return [fast if index % period else slow for index in range(samples)]


def log_normal(median: float, sigma: float, samples: int) -> list[float]:
    """Seconds of each sample, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    costs: list[float] = torch.empty(samples).normal_(0, sigma, generator=generator).exp_().tolist()
    return [median * cost for cost in costs]


def of_batches(costs: Sequence[float], batch_size: int) -> list[float]:
    """Seconds of each batch, whose samples are loaded one after the other."""
    return [sum(costs[first : first + batch_size]) for first in range(0, len(costs), batch_size)]


def ideal(costs: Sequence[float], workers: int) -> float:
    """Seconds that nobody can do without: all workers busy all the time, and no batch divided."""
    return max(sum(costs) / workers, *costs)


def list_schedule(costs: Sequence[float], workers: int, step: Step = NO_STEP) -> float:
    """Seconds of a list schedule, which needs no knowledge of costs: whoever is free takes the next batch,
    however far ahead that is, the consumer takes batches in order, and nothing else takes time."""
    free = [0.0] * workers
    now = 0.0
    for number, cost in enumerate(costs, 1):
        ready = free[0] + cost
        heapq.heapreplace(free, ready)
        now = max(now, ready)
        if number % step.every == 0:
            now += step.seconds
    return now
