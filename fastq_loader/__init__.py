"""A drop-in replacement for torch's DataLoader: `from fastq_loader import DataLoader`.

The way of a batch, and the module of each station: `loader` (arguments) → `iterator` → `engine` (the gate) →
`loop` (the event loop) → `processes` → `worker` → `fetch` and `collate` → `packing` → `allocator` and
`arena` (shared memory) → `transport` → `messages` → `scheduler` with `ring` and `blocks` → `delivery` →
`unpacking`; and on to a device: `link` → `staging` → `pinning` → `copies` → `device` → `transforms`.
"""

from fastq_loader.device.options import ToDevice
from fastq_loader.device.transforms import copy_into, normalize
from fastq_loader.errors import (
    InvalidTransition,
    IteratorInvalid,
    LoaderTimeout,
    PinFailed,
    PinFallback,
    PoisonousBatch,
    ProtocolError,
    UnpicklableError,
    WorkerDied,
    WorkerReplaced,
    WorkerTraceback,
)
from fastq_loader.loader import DataLoader
from fastq_loader.memory.allocator import empty
from fastq_loader.scheduling.options import Dynamic, RoundRobin
from fastq_loader.statistics import LateBatch, LoaderStatistics, StagingStatistics, WorkerStatistics
from fastq_loader.workers.options import Processes

__all__ = [
    "DataLoader",
    "Dynamic",
    "InvalidTransition",
    "IteratorInvalid",
    "LateBatch",
    "LoaderStatistics",
    "LoaderTimeout",
    "PinFailed",
    "PinFallback",
    "PoisonousBatch",
    "Processes",
    "ProtocolError",
    "RoundRobin",
    "StagingStatistics",
    "ToDevice",
    "UnpicklableError",
    "WorkerDied",
    "WorkerReplaced",
    "WorkerStatistics",
    "WorkerTraceback",
    "copy_into",
    "empty",
    "normalize",
]
