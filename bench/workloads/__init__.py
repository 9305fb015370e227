"""What a workload is, and the list of them.

Owns the protocol every workload follows. It must know nothing of any loader: a workload names a dataset, a
batch size and an order, and each peer turns these into its own arguments.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, default_collate

Step = Callable[[Any], None]

# Longer than any run: 20,000 batches of 64 a second would take 14 minutes to end the epoch. A sequential
# sampler over it is a `range`, which costs nothing to start.
ENDLESS = 1 << 30


@dataclass(frozen=True)
class Load:
    """A dataset and how it is to be batched, the same for every peer."""

    dataset: Dataset[Any]
    batch_size: int
    shuffle: bool = False

    def batch_bytes(self) -> int:
        """Bytes of all tensors in the first batch, collated as torch does."""
        return _tensor_bytes(default_collate([self.dataset[index] for index in range(self.batch_size)]))


class Workload(ABC):
    """One kind of data to load.

    Datasets are classes at the top level of their module, so that spawned workers can import them.
    """

    name: str
    description: str

    def prepare(self, folder: Path) -> None:  # noqa: B027 - most workloads need no files
        """Write the files that the dataset reads into `folder`: once a run, before any `build`."""

    @abstractmethod
    def build(self, folder: Path) -> Load:
        """Make the dataset; it may read what `prepare` wrote into `folder`."""

    def new_step(self) -> Step:
        """A function to call with every batch. One for each peer, so that each trains a model of its own."""
        return _no_step


def _no_step(batch: Any) -> None:
    """Take the batch and do nothing: the loader alone is timed."""


def _tensor_bytes(batch: Any) -> int:
    if isinstance(batch, dict):
        return sum(_tensor_bytes(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return sum(_tensor_bytes(value) for value in batch)
    return int(batch.nbytes)


def all_workloads() -> dict[str, Workload]:
    """Every workload by name, in the order of the report."""
    # Imported here because the modules themselves import the protocol above.
    from bench.workloads import csv_table, jpeg, large, rows, tokens

    workloads: tuple[Workload, ...] = (
        jpeg.Jpeg(),
        csv_table.CsvTable(),
        large.LARGE_U8,
        large.LARGE_F32,
        rows.Rows(),
        tokens.Tokens(),
    )
    return {workload.name: workload for workload in workloads}
