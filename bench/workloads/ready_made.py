"""Samples that are there already: what is timed is how a batch gets to the consumer, or onto a device.

`large_u8` and `large_f32`: images as bytes and as floats. `bytes_<n>`: batches of a given size, in
which transports differ. `Shape`: batches for the way onto a device.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.utils.data import Dataset, default_collate

from bench.workloads import Cycled, Load, Workload

IMAGES = 256  # as float32 154 MB: past any cache, so that samples come from memory as in training
SIZED_BATCH = 16  # samples; few, so that asking for them costs little beside their bytes
LARGEST_SET = 256 << 20  # bytes: past any cache, and small enough for any machine
MOST_SAMPLES = 4096


def _images(dtype: torch.dtype) -> Load:
    pixels = torch.randint(256, (IMAGES, 3, 224, 224), dtype=torch.uint8)
    return Load(Cycled(pixels if dtype == torch.uint8 else pixels.to(dtype).div_(255)), batch_size=64)


LARGE_BATCHES = (
    Workload("large_u8", "64 ready-made 3x224x224 images, uint8", lambda folder: _images(torch.uint8)),
    Workload("large_f32", "64 ready-made 3x224x224 images, float32", lambda folder: _images(torch.float32)),
)


def sized(batch_bytes: int) -> Workload:
    """The workload whose batches have that many bytes."""

    def build(folder: Path) -> Load:
        length = batch_bytes // SIZED_BATCH
        samples = min(MOST_SAMPLES, LARGEST_SET // length)
        return Load(Cycled(torch.randint(256, (samples, length), dtype=torch.uint8)), SIZED_BATCH)

    about = f"{SIZED_BATCH} ready-made samples, {batch_bytes:,} bytes together"
    return Workload(f"bytes_{batch_bytes}", about, build)


class Shape(NamedTuple):
    """A batch: `fields` tensors of `samples` x `sample_shape`; a single one is no dict."""

    name: str
    description: str
    fields: int
    samples: int
    sample_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of a batch."""
        return self.fields * self.samples * torch.Size(self.sample_shape).numel() * self.dtype.itemsize


# Two samples: collating many small pieces is Python's work in the workers, and not what is compared.
SHAPES = {
    shape.name: shape
    for shape in (
        Shape("large", "one uint8 tensor, 256 images of 3x224x224", 1, 256, (3, 224, 224), torch.uint8),
        Shape("fields_32", "32 fields of 64 KiB, float32", 32, 2, (8192,), torch.float32),
        Shape("fields_500", "500 fields of 256 bytes, float32", 500, 2, (32,), torch.float32),
    )
}


class ReadyMade(Dataset[Any]):
    """Samples that are there already: a batch costs a worker one copy, into the memory it leaves in."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape

    @cached_property
    def _samples(self) -> list[Any]:
        """Made where it is first used, in the worker: it does not travel."""
        shape = self._shape
        size = shape.fields, shape.samples, *shape.sample_shape
        count = torch.Size(size).numel()
        # 251 is prime: neighbours, samples and fields all differ, also within a byte.
        values = torch.arange(251).to(shape.dtype).repeat(count // 251 + 1)[:count].view(size)
        if shape.fields == 1:
            return list(values[0])
        return [
            {f"field {number}": values[number, sample] for number in range(shape.fields)}
            for sample in range(shape.samples)
        ]

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self._samples[index] for index in indices]

    def __getstate__(self) -> dict[str, Any]:
        return {"_shape": self._shape}

    def batch(self) -> Any:
        """What every batch has to be, on the host."""
        return default_collate(self._samples)
