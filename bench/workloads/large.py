"""Batches of images already decoded, as bytes and as floats: bound by how a batch gets to the consumer."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bench.workloads import ENDLESS, Load, Workload

SAMPLES = 256  # as float32 154 MB: past any cache, so that samples come from memory as in training
SHAPE = (3, 224, 224)


class Images(Dataset[Tensor]):
    """`dataset[i]` is image `i % len(images)`, a view: no copy and no arithmetic."""

    def __init__(self, dtype: torch.dtype) -> None:
        pixels = torch.randint(256, (SAMPLES, *SHAPE), dtype=torch.uint8)
        self.images = pixels if dtype == torch.uint8 else pixels.to(dtype).div_(255)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> Tensor:
        return self.images[index % SAMPLES]


class Large(Workload):
    transport_bound = True

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name = name
        self.description = f"64 ready-made 3x224x224 images, {str(dtype).removeprefix('torch.')}"
        self.dtype = dtype

    def build(self, folder: Path) -> Load:
        return Load(Images(self.dtype), batch_size=64)


LARGE_U8 = Large("large_u8", torch.uint8)
LARGE_F32 = Large("large_f32", torch.float32)
