"""Setups of a pool of workers and of each of its workers.

Made in the consumer. A `Setup` is read in the worker, which inherits it or gets it pickled.
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
    """Plan of a pool of workers; fixed for its life.

    Attributes:
        payload: the user's objects.
        rules: how the dataset is read.
        workers: how many.
        prefetch: batches that each works ahead.
        in_order: whether batches are delivered in the order of the sampler.
        dynamic: whether any worker may load any batch, each seeded for itself.
        window: the pool's, as it begins.
        restarts: how many workers that died are replaced in an epoch.
        timeout: seconds to wait for a message; 0 waits for ever.
        persistent: whether the pool serves more than one epoch.
        context: multiprocessing's context; None is the default when the pool starts.
        make_pool: makes the pool, a `WorkerPool`; None on another machine, and in proxies.
        for_device: whether batches go on to a device, and are laid out for it.
        save_generators: whether workers send the states of their generators with each batch.
        reseed: whether the user's own generators are seeded for each batch, too.
        grace: seconds for which a worker outlives a SIGTERM that is not its consumer's.
        kept: of the loader: what its next pools use again, by name.
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
    reseed: bool = False
    grace: float = 0.0
    kept: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def shared_tasks(self) -> bool:
        """Whether any worker may claim a task. Not of an iterable dataset: each worker has a part of it to
        itself."""
        return self.dynamic and not self.rules.iterable


@dataclass(frozen=True)
class Setup:
    """Setup of one worker.

    Attributes:
        plan: the pool's, without what stays in the consumer.
        worker: its number.
        generation: how many processes had its number before.
        folder: where it binds its socket.
        space: ranges (offset, size) of its part of the arena in which it can make blocks; None is all of it.
        consumer: process id of the consumer.
        base_seed, shared_seed: see `generators` and `datapipes`.
        token: the pool's, see `messages`.
        mapping: the arena.
        descriptors: `stacks` (see there).
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
    """Fields that differ between the setups of a pool's workers."""
    return {name: getattr(setup, name) for name in ("worker", "generation", "folder", "space")}
