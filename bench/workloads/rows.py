"""Rows of a few numbers: 2.6 KB a batch, bound by what a loader spends on every batch and every sample."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 4096
CLASSES = 10


class LabelledRows(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` is (float32[8], int): a row of one tensor, indexed sample by sample, and its label."""

    def __init__(self) -> None:
        self.rows = torch.rand(SAMPLES, 8)
        self.labels = [row % CLASSES for row in range(SAMPLES)]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        which = index % SAMPLES
        return self.rows[which], self.labels[which]


class Rows(Workload):
    name = "rows"
    description = "64 rows of 8 floats and an integer label"
    transport_bound = True

    def build(self, folder: Path) -> Load:
        return Load(LabelledRows(), batch_size=64)
