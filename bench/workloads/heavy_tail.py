"""Samples whose cost has a heavy tail: what a loader does while one worker is late.

A cost is a log-normal sleep, which stands for the latency of a disk or an object store: the median is half
a millisecond, one sample in a hundred takes 16 ms or more, and every seventh batch has such a one in it. It
is a sleep and not work, so that the result does not depend on how many cores are free, only on who waits for
whom.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 4096
MEDIAN_S, SIGMA = 0.0005, 1.5
LONGEST_S = 0.1  # a stall that a single draw could stretch over a whole block would be noise
BATCH = 16


class SlowSamples(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` is (float32[256], int) after sleeping as long as sample `i` always does."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        costs = torch.empty(SAMPLES).normal_(0, SIGMA, generator=generator).exp_().mul_(MEDIAN_S)
        self.seconds = costs.clamp_(max=LONGEST_S).tolist()
        self.rows = torch.rand(SAMPLES, 256, generator=generator)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % SAMPLES
        time.sleep(self.seconds[which])
        return self.rows[which], which


class HeavyTail(Workload):
    name = "heavy_tail"
    description = "16 samples that sleep: log-normal, median 0.5 ms, one in a hundred over 16 ms"

    def build(self, folder: Path) -> Load:
        return Load(SlowSamples(), batch_size=BATCH)
