"""Setups of a pool of workers and of each of its workers.

Made in the consumer. A `Setup` is read in the worker, which inherits or unpickles it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any

from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import Extents
from fastq_loader.scheduling.schedules import Dynamic, Schedule, Window
from fastq_loader.workers.payload import Payload

if TYPE_CHECKING:
    from fastq_loader.device.accelerator import ToDevice
    from fastq_loader.reading.error_policy import ErrorPolicy


@dataclass(frozen=True)
class Rules:
    """How a dataset is read: the fields of torch's fetchers."""

    iterable: bool
    auto_collation: bool
    drop_last: bool


@dataclass(frozen=True)
class Options:
    """The arguments that torch lacks, resolved. Made by the constructor of a loader, and immutable.

    A loader has the arguments as attributes, too, for frameworks that rebuild it from them. But a subclass
    may use these names for something else, such as the device of a model. So nothing reads the attributes.
    """

    schedule: Schedule
    device: ToDevice | None
    errors: ErrorPolicy | None
    workers: Any  # a `WorkerKind`, which makes pools from plans

    @property
    def is_dynamic(self) -> bool:
        """Whether every batch has random numbers of its own."""
        return isinstance(self.schedule, Dynamic)


@dataclass(frozen=True)
class Plan:
    """Plan of a pool of workers; it does not change during the pool's life.

    Attributes:
        payload: the user's objects.
        rules: how the dataset is read.
        options: the loader's; in a worker without `device` and `errors`.
        workers: number of workers.
        prefetch: number of batches that each worker loads ahead.
        in_order: whether batches are delivered in the order of the sampler.
        shared_tasks: whether any worker may claim a task. Each worker reads its own part of an iterable
            dataset.
        window: the window with which the pool starts.
        timeout: seconds to wait for a message; 0 waits for ever.
        persistent: whether the pool serves more than one epoch.
        context: multiprocessing's context; None is the default context at the pool's start.
        for_device: whether batches go on to a device, and are laid out for it.
        saves: which states workers send with each batch; see `Reader`.
        grace: seconds for which a worker outlives SIGTERM and SIGINT that its consumer did not send.
        interpreters: interpreters that the loader keeps to fork workers from, by start method.
    """

    payload: Payload
    rules: Rules
    options: Options
    workers: int
    prefetch: int
    in_order: bool
    shared_tasks: bool
    window: Window
    timeout: float
    persistent: bool
    context: BaseContext | None
    for_device: bool = False
    saves: str = ""
    grace: float = 0.0
    interpreters: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def restarts(self) -> int:
        """How many dead workers are replaced in an epoch."""
        restarts: int = self.options.workers.restarts(self.rules.iterable)
        return restarts


@dataclass(frozen=True)
class Setup:
    """Setup of one worker.

    Attributes:
        plan: the pool's plan, without the fields that stay in the consumer.
        worker: number of the worker.
        space: ranges (offset, size) of its part of the arena in which it can make blocks; None is all of it.
        consumer: process id of the consumer.
        base_seed, shared_seed: see `generators` and `datapipes`.
        token: the pool's token, see `messages`.
        mapping: the arena.
        descriptors: the worker's ends of its `Line`, and the write end of `children.Stacks`, as "stacks".
    """

    plan: Plan
    worker: int
    space: Extents | None
    consumer: int
    base_seed: int
    shared_seed: int | None
    token: bytes = field(repr=False)
    mapping: Mapping | None
    descriptors: dict[str, int]


def own_fields(setup: Setup) -> tuple[dict[str, Any], list[int]]:
    """Return the fields that differ between the setups of a pool's workers, and the worker's ends of its
    `Line`: "answers" and "tasks"."""
    ends = [setup.descriptors["answers"], setup.descriptors["tasks"]]
    return {"worker": setup.worker, "space": setup.space}, ends
