"""A drop-in replacement for torch's DataLoader: `from fastq_loader import DataLoader`.

The way of a batch, and the module of each station: `loader` (arguments) → `iterator` → `engine` (the gate) →
`loop` (the event loop) → `processes` → `worker` → `fetch` and `collate` → `packing` → `allocator` and
`arena` (shared memory) → `transport` → `messages` → `scheduler` with `ring` and `blocks` → `unpacking`.
"""

from fastq_loader.allocator import empty
from fastq_loader.errors import (
    IteratorInvalid,
    LoaderTimeout,
    UnpicklableError,
    WorkerDied,
    WorkerTraceback,
)
from fastq_loader.loader import DataLoader
from fastq_loader.statistics import LoaderStatistics, WorkerStatistics

__all__ = [
    "DataLoader",
    "IteratorInvalid",
    "LoaderStatistics",
    "LoaderTimeout",
    "UnpicklableError",
    "WorkerDied",
    "WorkerStatistics",
    "WorkerTraceback",
    "empty",
]
