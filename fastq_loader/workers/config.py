"""What a pool of workers and each of its workers are told when they start.

Made in the consumer. A `Setup` is read in the worker, which inherits it or gets it pickled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING

from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import Extents
from fastq_loader.scheduling.schedules import WindowLimits
from fastq_loader.workers.payload import Descriptors, Payload, PickledPayload

if TYPE_CHECKING:
    from fastq_loader.workers.backend import WorkerBackend


@dataclass(frozen=True)
class Rules:
    """How a dataset is read; the fields of torch's fetchers."""

    iterable: bool
    auto_collation: bool
    drop_last: bool


@dataclass(frozen=True)
class Plan:
    """What a pool of workers is to do; fixed for its life.

    Attributes:
        payload: the user's objects.
        rules: how the dataset is read.
        workers: how many.
        prefetch: batches that each works ahead.
        in_order: whether batches are delivered in the order of the sampler.
        dynamic: whether any worker may load any batch, each seeded for itself.
        window: how wide the pool's window may be.
        restarts: how many workers that died are replaced in an epoch.
        timeout: seconds to wait for a message; 0 waits for ever.
        persistent: whether the pool serves more than one epoch.
        context: multiprocessing's context; None is the default when the pool starts.
        backend: makes the pool's processes.
        for_device: whether batches go on to a device, and are laid out for it.
        save_generators: whether workers send the states of their generators with each batch.
    """

    payload: Payload | PickledPayload
    rules: Rules
    workers: int
    prefetch: int
    in_order: bool
    dynamic: bool
    window: WindowLimits
    restarts: int
    timeout: float
    persistent: bool
    context: BaseContext | None
    backend: Callable[[Plan], WorkerBackend]
    for_device: bool = False
    save_generators: bool = False

    @property
    def shared_tasks(self) -> bool:
        """Whether any worker may claim a task. Not of an iterable dataset: each worker has a part of it to
        itself."""
        return self.dynamic and not self.rules.iterable


@dataclass(frozen=True)
class Setup:
    """What one worker is told.

    Attributes:
        plan: the pool's, without its context.
        worker: its number.
        generation: how many processes had its number before.
        folder: where it binds its socket.
        space: ranges (offset, size) of its part of the arena in which it can make blocks; None is all of it.
        consumer: process id of the consumer.
        base_seed, shared_seed: see `generators` and `datapipes`.
        token: the pool's, see `messages`.
        mapping: the arena as the consumer has mapped it, if the worker inherits that.
        arena_length: bytes of the arena.
        arena_whole: whether it is mapped as a whole.
        descriptors: `arena` (the memfd) and `stacks` (see there).
    """

    plan: Plan
    worker: int
    generation: int
    folder: str
    space: Extents | None
    consumer: int
    base_seed: int
    shared_seed: int | None
    token: bytes = field(repr=False)
    mapping: Mapping | None
    arena_length: int
    arena_whole: bool
    descriptors: Descriptors
