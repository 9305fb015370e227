"""Batches of a given size and nothing else to pay for: the axis on which transports differ."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

BATCH = 16  # samples; few, so that the cost of asking for them stays small beside that of their bytes
LARGEST_SET = 256 << 20  # bytes of ready-made samples: past any cache, and small enough for any machine
MOST_SAMPLES = 4096


class ReadyMade(Dataset[Tensor]):
    """`dataset[i]` is uint8[length], a view on a ready-made sample: no copy and no arithmetic."""

    def __init__(self, length: int) -> None:
        samples = min(MOST_SAMPLES, LARGEST_SET // length)
        self.samples = torch.randint(256, (samples, length), dtype=torch.uint8)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index % len(self.samples)]


class Sized(Workload):
    transport_bound = True

    def __init__(self, batch_bytes: int) -> None:
        self.name = f"bytes_{batch_bytes}"
        self.description = f"{BATCH} ready-made samples, {batch_bytes:,} bytes together"
        self.length = batch_bytes // BATCH

    def build(self, folder: Path) -> Load:
        return Load(ReadyMade(self.length), batch_size=BATCH)
