"""Samples that sleep: what a loader does while one worker is late.

A sleep stands for the latency of a disk or an object store: what is measured is who waits for whom, not how
many cores are free. `heavy_tail` is one of the workloads; `TracedSamples` tell when they were made, for the
cases of the schedule.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import Cycled, Endless, Load, Workload

SAMPLES = 4096
MEDIAN_S, SIGMA = 0.0005, 1.5  # one sample in a hundred takes 16 ms, every seventh batch has such a one
LONGEST_S = 0.1  # a stall that a single draw could stretch over a whole block would be noise
BATCH = 16
NAP_SAMPLES, NAP_BYTES = 16, 1 << 19
INDEX, START, END = range(3)
"""Columns of a traced sample."""


def log_normal(median: float, sigma: float, samples: int) -> list[float]:
    """Seconds of each sample, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    costs: list[float] = torch.empty(samples).normal_(0, sigma, generator=generator).exp_().tolist()
    return [median * cost for cost in costs]


class SlowSamples(Endless):
    """`dataset[i]` is (float32[256], int) after sleeping as long as sample `i` always does."""

    def __init__(self) -> None:
        self.seconds = [min(cost, LONGEST_S) for cost in log_normal(MEDIAN_S, SIGMA, SAMPLES)]
        self.rows = torch.rand(SAMPLES, 256, generator=torch.Generator().manual_seed(1))

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % SAMPLES
        time.sleep(self.seconds[which])
        return self.rows[which], which


HEAVY_TAIL = Workload(
    "heavy_tail",
    "16 samples that sleep: log-normal, median 0.5 ms, one in a hundred over 16 ms",
    lambda folder: Load(SlowSamples(), batch_size=BATCH),
)


class Naps(Cycled):
    """`dataset[i]` is uint8[nbytes], after a sleep of so many seconds: work that takes no CPU here.

    There are a few samples only, because other machines get the dataset, too.
    """

    def __init__(self, seconds: float, nbytes: int = NAP_BYTES) -> None:
        super().__init__(torch.randint(256, (NAP_SAMPLES, nbytes), dtype=torch.uint8))
        self.seconds = seconds

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        sample: Tensor = super().__getitem__(index)
        return sample


def naps(milliseconds: float, batches: int | None = None) -> Workload:
    """Batches of one such sample, so many in an epoch."""
    about = f"one sample of {NAP_BYTES:,} bytes, after a sleep of {milliseconds:g} ms"
    return Workload(
        f"nap_{milliseconds:g}", about, lambda folder: Load(Naps(milliseconds / 1e3), 1, batches=batches)
    )


class TracedSamples(Dataset[Tensor]):
    """`dataset[i]` is float64[3] after a sleep of `costs[i]` seconds: `i`, and `time.monotonic` before and
    after, which all processes of a machine share."""

    def __init__(self, costs: Sequence[float]) -> None:
        self.costs = list(costs)

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, index: int) -> Tensor:
        start = time.monotonic()
        if self.costs[index]:
            time.sleep(self.costs[index])
        return torch.tensor((index, start, time.monotonic()), dtype=torch.float64)


class Step(NamedTuple):
    """What the consumer does with the GIL held: `seconds` of pure Python after every `every` batches."""

    seconds: float
    every: int


NO_STEP = Step(0.0, 1)


def of_batches(costs: Sequence[float], batch_size: int) -> list[float]:
    """Seconds of each batch, whose samples are loaded one after the other."""
    return [sum(costs[first : first + batch_size]) for first in range(0, len(costs), batch_size)]


def ideal(costs: Sequence[float], workers: int) -> float:
    """Seconds that nobody can do without: all workers are busy all the time, and no batch is divided."""
    return max(sum(costs) / workers, *costs)
