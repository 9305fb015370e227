"""A dataset that takes the indices of a batch at once, over a million rows: bound by handling the indices.

The form that users choose who care about speed: `__getitems__` indexes the tensor once and returns the batch,
and the collate function hands it on. Beside it stands the loop that needs no loader at all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, RandomSampler

from bench.workloads import Load, Loop, Workload

ROWS = 1_000_000
WIDTH = 16
BATCH = 4096

T = TypeVar("T")


class VectorisedRows(Dataset[Tensor]):
    """`dataset[i]` is float32[16]; `dataset.__getitems__(indices)` is float32[len(indices), 16]."""

    def __init__(self) -> None:
        self.rows = torch.rand(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]

    def __getitems__(self, indices: list[int]) -> Tensor:
        # By way of numpy, which reads a list of 4096 integers in 0.1 ms; torch takes 0.5 ms.
        return self.rows[torch.from_numpy(np.array(indices))]


def as_it_is(batch: T) -> T:
    """Collate nothing: `__getitems__` has made the batch."""
    return batch


class Vectorised(Workload):
    name = "vectorised"
    description = "4096 shuffled rows of 1,000,000 x 16 float32, fetched by one vectorised call"
    transport_bound = True

    def build(self, folder: Path) -> Load:
        return Load(VectorisedRows(), batch_size=BATCH, shuffle=True, collate_fn=as_it_is)

    def loops(self, load: Load) -> Mapping[str, Loop]:
        dataset, sampler = load.dataset, load.sampler()
        assert isinstance(dataset, VectorisedRows)
        assert isinstance(sampler, RandomSampler)

        def by_hand() -> Iterator[Tensor]:
            # The sampler's own draw and order, so that the batches are the same.
            order = torch.randperm(ROWS, generator=sampler.generator)
            whole = sampler.num_samples // BATCH * BATCH
            for indices in torch.split(order[:whole], BATCH):
                yield dataset.rows[indices]

        return {"slicing by hand": by_hand}
