"""The names of the core that `extras` import: all that an extra may rely on.

An extra imports from the core through this module only, and this module imports no extra. So a change of the
core that keeps these names and their meaning breaks no extra. Has no code; runs in every process.
"""

from fastq_loader import options
from fastq_loader.device import captures
from fastq_loader.device.staging import CapturedCall
from fastq_loader.device.transforms import members_of, normalize, rebuilt
from fastq_loader.epoch import resources, samplers, saved
from fastq_loader.epoch.fields import EpochSnapshot, Saved
from fastq_loader.epoch.prefetcher import Prefetcher
from fastq_loader.epoch.record import EpochRecord
from fastq_loader.errors import (
    DuplicateData,
    IdleWorker,
    LoaderHint,
    MemoryPressure,
    NotCached,
    PinnedCopies,
    PrivateGenerators,
    ProtocolError,
    SameOrder,
    TinyBatches,
    UnpicklableError,
    check_seconds,
    checked_names,
    is_int,
    shorten,
    warn_user,
)
from fastq_loader.ipc import endpoints
from fastq_loader.ipc.claim_table import WORKERS, Busy, ClaimTable
from fastq_loader.ipc.decoding import decode_for_consumer
from fastq_loader.ipc.inbox import Inbox
from fastq_loader.ipc.messages import (
    ENDED,
    LEFT_OUT,
    PASSED,
    SKIPPED,
    VERSION,
    Answer,
    BatchHandle,
    Epoch,
    Message,
    Ping,
    Space,
    Stop,
    Task,
    encode,
    reencode,
)
from fastq_loader.ipc.sockets import WorkerSocket
from fastq_loader.loader import DataLoader, T_co
from fastq_loader.memory import allocator, mapped
from fastq_loader.memory.allocator import Allocator, Used
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import BlockOwner, Extents
from fastq_loader.memory.pool import BlockPool
from fastq_loader.options import Loader
from fastq_loader.packing import pickling
from fastq_loader.packing.pickling import PLAIN_DTYPES, dump_exception, is_leaf, load_exception, parts_of
from fastq_loader.packing.tensors import tensors_of
from fastq_loader.reading import collate, generators, sample_seeds
from fastq_loader.reading.first_indices import KEPT
from fastq_loader.scheduling.progress import Progress
from fastq_loader.scheduling.schedules import Dynamic, RoundRobin, Window
from fastq_loader.statistics import records
from fastq_loader.statistics.counters import Counters, EpochLog
from fastq_loader.statistics.epoch import FIRST_BATCHES, EpochCounters
from fastq_loader.statistics.snapshots import (
    CAUSES,
    CacheStatistics,
    EpochStatistics,
    LateBatch,
    LoaderStatistics,
    StagingStatistics,
    WorkerStatistics,
)
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.system import attributes, calls, locks, pages, process_id, torch_patches
from fastq_loader.system.interrupts import without_signals
from fastq_loader.system.terminal import printable
from fastq_loader.system.walk import Walk, function_members
from fastq_loader.workers import children
from fastq_loader.workers.children import Child, Launch, leave_with
from fastq_loader.workers.config import Plan, Setup, own_fields
from fastq_loader.workers.kinds import Auto, WorkerKind
from fastq_loader.workers.main import WorkerLoop, open_socket, prepare_signals
from fastq_loader.workers.payload import BESIDE, Descriptors, Payload, PickledPayload
from fastq_loader.workers.task_queue import TaskQueue
from fastq_loader.workers.worker import Worker
from fastq_loader.workers.worker_pool import WorkerPool
from fastq_loader.workers.zygote import Zygote, copy_of_consumer, fork_copy
