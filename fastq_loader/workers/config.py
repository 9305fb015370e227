"""Setups of a pool of workers and of each of its workers.

Made in the consumer. A `Setup` is read in the worker, which inherits or unpickles it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import Any

from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import Extents
from fastq_loader.scheduling.schedules import Window
from fastq_loader.workers.payload import Payload


@dataclass(frozen=True)
class Rules:
    """How a dataset is read: the fields of torch's fetchers, and `population` of `TolerantFetcher`."""

    iterable: bool
    auto_collation: bool
    drop_last: bool
    population: int | None = None


@dataclass(frozen=True)
class Plan:
    """Plan of a pool of workers; it does not change during the pool's life.

    Attributes:
        payload: the user's objects.
        rules: how the dataset is read.
        workers: number of workers.
        prefetch: number of batches that each worker loads ahead.
        in_order: whether batches are delivered in the order of the sampler.
        dynamic: whether any worker may load any batch; then each batch is seeded separately.
        window: the window with which the pool starts.
        restarts: how many dead workers are replaced in an epoch.
        timeout: seconds to wait for a message; 0 waits for ever.
        persistent: whether the pool serves more than one epoch.
        context: multiprocessing's context; None is the default context at the pool's start.
        make_pool: makes the pool, a `WorkerPool`; None on another machine, and in proxies.
        for_device: whether batches go on to a device, and are laid out for it.
        save_generators: whether workers send the states of their generators with each batch.
        grace: seconds for which a worker outlives a SIGTERM that its consumer did not send.
        kept: objects of the loader that its later pools use again, by name.
    """

    payload: Payload
    rules: Rules
    workers: int
    prefetch: int
    in_order: bool
    dynamic: bool
    window: Window
    restarts: int
    timeout: float
    persistent: bool
    context: BaseContext | None
    make_pool: Callable[[Plan], Any] | None
    for_device: bool = False
    save_generators: bool = False
    grace: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def shared_tasks(self) -> bool:
        """Whether any worker may claim a task. Each worker reads its own part of an iterable dataset."""
        return self.dynamic and not self.rules.iterable


@dataclass(frozen=True)
class Setup:
    """Setup of one worker.

    Attributes:
        plan: the pool's plan, without the fields that stay in the consumer.
        worker: number of the worker.
        generation: number of earlier processes with the worker's number.
        folder: folder in which the worker binds its socket.
        space: ranges (offset, size) of its part of the arena in which it can make blocks; None is all of it.
        consumer: process id of the consumer.
        base_seed, shared_seed: see `generators` and `datapipes`.
        token: the pool's token, see `messages`.
        mapping: the arena.
        descriptors: the write end of `children.Stacks`, as "stacks".
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
    descriptors: dict[str, int]


def own_fields(setup: Setup) -> dict[str, Any]:
    """Return the fields that differ between the setups of a pool's workers."""
    return {name: getattr(setup, name) for name in ("worker", "generation", "folder", "space")}
