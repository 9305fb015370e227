"""Rows of a few numbers: 2.6 KB a batch, bound by what a loader spends on every batch and every sample."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 4096


class LabelledRows(Dataset[tuple[Tensor, int]]):
    """`dataset[i]` is (float32[8], int)."""

    def __init__(self) -> None:
        self.rows = [(row, label % 10) for label, row in enumerate(torch.rand(SAMPLES, 8))]

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.rows[index % SAMPLES]


class Rows(Workload):
    name = "rows"
    description = "64 rows of 8 floats and an integer label"

    def build(self, folder: Path) -> Load:
        return Load(LabelledRows(), batch_size=64)
