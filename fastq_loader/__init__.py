"""A drop-in replacement for torch's DataLoader: `from fastq_loader import DataLoader`.

| for | there is |
|---|---|
| schedules, and kinds of workers | `RoundRobin`, `Dynamic`, `Processes`, `RayWorkers` |
| unreadable samples | `Replace`, `Skip` |
| samplers, helpers | `PermutationSampler`, `WeightedSampler`, `Distributed`, `share`, `empty`, `normalize` |
| statistics and bottlenecks | `LoaderStatistics`, `EpochStatistics`, `WorkerStatistics`, `Diagnosis` |
| comparison with torch, and tuning | `compare`, `tune` |
| copies to a device | `ToDevice`, `copy_into`, and `Prefetcher` for any loader |
| libraries that create loaders | `install`, `assert_active`, and the modules in `fastq_loader.integrations` |
| preemption and resume | `preemption`, `StatefulDataLoader` |

The examples assume that `torch` and the names of this package are imported.

The path of a batch through the folders: `loader` reads the `options` and begins an `epoch`. Its
`consumer` asks `scheduling` what to load next and sends a task to the `workers`, which read the
dataset (`reading`) and write the batch to shared memory (`packing`, `memory`). The answer comes back over
`ipc`; the consumer returns the batch, or `device` copies it to an accelerator first.
"""

from fastq_loader.device.accelerator import ToDevice
from fastq_loader.epoch.fields import Position
from fastq_loader.errors import (
    BadSampleFound,
    DuplicateData,
    IdleWorker,
    InvalidTransition,
    IteratorInvalid,
    LoaderHint,
    LoaderTimeout,
    MemoryPressure,
    NotCached,
    PinFailed,
    PinFallback,
    PinnedCopies,
    PoisonBatch,
    PrivateGenerators,
    ProtocolError,
    SameOrder,
    TinyBatches,
    TorchWorkers,
    UnpicklableError,
    WorkerDied,
    WorkerReplaced,
    WorkerTraceback,
)
from fastq_loader.extras.bad_samples.policies import Replace, Skip
from fastq_loader.extras.cached.cached import cached
from fastq_loader.extras.cached.counters import CacheStatistics
from fastq_loader.extras.frameworks.installing import assert_active, install, installed, uninstall
from fastq_loader.extras.insight.snapshots import (
    EpochStatistics,
    LateBatch,
    LoaderStatistics,
    WorkerStatistics,
)
from fastq_loader.extras.insight.verdict import Diagnosis
from fastq_loader.extras.prefetcher.prefetcher import Prefetcher
from fastq_loader.extras.recovery.preemption import preemption
from fastq_loader.extras.remote.ray_workers import RayWorkers
from fastq_loader.extras.resume.stateful_dataloader import StatefulDataLoader
from fastq_loader.extras.samplers.samplers import Distributed, PermutationSampler, WeightedSampler
from fastq_loader.extras.share.share import share, sharing_report
from fastq_loader.extras.tools.comparing import Comparison, ComparisonRow, compare
from fastq_loader.extras.tools.tuning import Tuning, TuningRow, tune
from fastq_loader.extras.transforms.transforms import copy_into, normalize
from fastq_loader.loader import DataLoader
from fastq_loader.memory.allocator import empty
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.scheduling.schedules import Dynamic, RoundRobin
from fastq_loader.statistics.snapshots import BadSample, StagingStatistics
from fastq_loader.workers.kinds import Processes

if AVAILABLE:  # imported now: a program may give up the right to read files before it iterates
    from fastq_loader.extras.insight import hints as _hints  # noqa: F401
    from fastq_loader.workers import local_pool as _local_pool  # noqa: F401

__docformat__ = "google"  # for pdoc
__all__ = [
    "BadSample",
    "BadSampleFound",
    "CacheStatistics",
    "Comparison",
    "ComparisonRow",
    "DataLoader",
    "Diagnosis",
    "Distributed",
    "DuplicateData",
    "Dynamic",
    "EpochStatistics",
    "IdleWorker",
    "InvalidTransition",
    "IteratorInvalid",
    "LateBatch",
    "LoaderHint",
    "LoaderStatistics",
    "LoaderTimeout",
    "MemoryPressure",
    "NotCached",
    "PermutationSampler",
    "PinFailed",
    "PinFallback",
    "PinnedCopies",
    "PoisonBatch",
    "Position",
    "Prefetcher",
    "PrivateGenerators",
    "Processes",
    "ProtocolError",
    "RayWorkers",
    "Replace",
    "RoundRobin",
    "SameOrder",
    "Skip",
    "StagingStatistics",
    "StatefulDataLoader",
    "TinyBatches",
    "ToDevice",
    "TorchWorkers",
    "Tuning",
    "TuningRow",
    "UnpicklableError",
    "WeightedSampler",
    "WorkerDied",
    "WorkerReplaced",
    "WorkerStatistics",
    "WorkerTraceback",
    "assert_active",
    "cached",
    "compare",
    "copy_into",
    "empty",
    "install",
    "installed",
    "normalize",
    "preemption",
    "share",
    "sharing_report",
    "tune",
    "uninstall",
]
