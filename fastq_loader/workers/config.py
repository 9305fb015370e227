"""What a worker is told when it is started, besides the user's objects.

Made in the consumer, read in the worker.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from fastq_loader.memory.ledger import Extents
from fastq_loader.workers.payload import Descriptors


@dataclass(frozen=True)
class Rules:
    """How a dataset is read; the fields of torch's fetchers."""

    iterable: bool
    auto_collation: bool
    drop_last: bool


@dataclass(frozen=True)
class Setup:
    """What a worker needs to know besides the user's objects.

    Attributes:
        worker: its number; `workers`: how many there are.
        generation: how many had its number before it.
        consumer: process id of the consumer.
        base_seed, shared_seed: see `seeding` and `datapipes`.
        rules: how the dataset is read.
        shared_tasks: whether any worker may claim a task.
        folder: where the sockets are.
        token: the pool's, see `messages`.
        arena_length: bytes of the shared memory.
        space: ranges (offset, size) of its part of that in which it can make blocks; None is all of it.
        descriptors: `arena` (the memfd) and `stacks` (a pipe for the Python stacks of hung workers).
        for_device: whether batches go on to a device, each in one piece.
        nontemporal_from: bytes of a batch from which on the next one is written with non-temporal stores.
        persistent: whether the worker is there for more than one epoch.
        arena_whole: whether the shared memory is mapped as a whole.
    """

    worker: int
    generation: int
    workers: int
    consumer: int
    base_seed: int
    shared_seed: int | None
    rules: Rules
    shared_tasks: bool
    folder: str
    token: bytes = field(repr=False)
    arena_length: int
    space: Extents | None
    descriptors: Descriptors
    for_device: bool = False
    nontemporal_from: float = math.inf
    persistent: bool = True
    arena_whole: bool = True
