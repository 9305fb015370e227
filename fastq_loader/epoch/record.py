"""The epoch that a loader is in: its start and its progress.

Runs in the consumer, on the thread that calls `iter()` and `next()`. References neither an iterator nor
workers, so `state_dict()` also works when those are gone.
"""

from __future__ import annotations

import copy
import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastq_loader import options
from fastq_loader.epoch.fields import EpochStart, Position, Saved
from fastq_loader.epoch.order import Order
from fastq_loader.options import Loader
from fastq_loader.reading import generators
from fastq_loader.scheduling.progress import START, UNKNOWN, Progress, WorkerProgress
from fastq_loader.workers.config import Options


def mixed(seed: int, *numbers: int) -> int:
    """Derive an unrelated seed from a seed and further numbers."""
    packed = struct.pack(f"<{1 + len(numbers)}q", seed, *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class EpochRecord:
    """One epoch of a loader.

    Args:
        order: the order of its indices, with the epoch's start.
        saved: the state it was resumed from, or None.
        readers: number of dataset readers whose progress is recorded (workers, or 1 without workers); 0 if
            it is not needed.

    Attributes:
        order: the order of its indices, with the progress in it.
        start: its start.
        continues_workers: it follows a saved epoch whose workers would have served this one, too.
        tells_readers: whether its readers must be sent their saved progress.
        persistent: whether its readers serve the next epoch, too.
        constant: the part of a state that stays the same: the compared fields, and the start as text; None
            until a state needs it.
        bad_samples: judges them; None where they are not tolerated.
        shown: of an epoch that a `Prefetcher` reads ahead: a function that returns the state after the
            batches which that delivered, and the position there.
    """

    def __init__(self, order: Order, saved: Saved | None, readers: int) -> None:
        self.order, self.start = order, order.start
        self.saved = saved
        self.continues_workers = self.tells_readers = self.persistent = False
        self.constant: tuple[dict[str, Any], str] | None = None
        self.bad_samples: Any = None
        self.shown: tuple[Callable[[], dict[str, Any]], Position] | None = None
        progress = order.progress
        if readers and not progress.workers:
            order.progress = Progress(progress.delivered, progress.beyond, (WorkerProgress(),) * readers)

    @property
    def position(self) -> Position:
        """The loader's position in this epoch."""
        progress = self.order.progress
        epoch, batches = self.start.epoch, self.start.batches + progress.delivered
        return (
            Position(epoch + 1, 0, batches) if progress.over else Position(epoch, progress.delivered, batches)
        )

    @property
    def shown_position(self) -> Position:
        """Position visible to the user, which lags behind if a `Prefetcher` reads ahead."""
        return self.position if self.shown is None else self.shown[1]

    # ---- used by an iterator when the epoch begins --------------------------------------------

    def draw_base_seed(self, generator: torch.Generator | None) -> int:
        """Return the seed of the iteration, drawn unless the epoch was resumed, or its workers would have
        lived on."""
        if self.continues_workers:
            return self.follow_base_seed(self.start.base_seed)
        if self.saved is None:
            self.start.base_seed = generators.draw_base_seed(generator)
        return self.start.base_seed

    def follow_base_seed(self, seed: int) -> int:
        """Derive the seed of an epoch for which torch draws none, because its workers live on, from the seed
        of the previous epoch."""
        if self.saved is None:
            self.start.base_seed = mixed(seed, self.start.epoch)
        return self.start.base_seed

    @property
    def pool_seed(self) -> int:
        """The base seed of new workers.

        Not the original one if the epoch is resumed in the middle: workers would draw the same random
        numbers as before for other samples. If progress is recorded for each worker, those with delivered
        batches get a seed of their own instead (see `resume`)."""
        progress = self.order.progress
        if self.saved is None or not progress.delivered or progress.workers:
            return self.start.base_seed
        return mixed(self.start.base_seed, progress.delivered)

    @property
    def resume(self) -> list[tuple[int, dict[str, Any] | None]]:
        """For each worker: the number of its delivered batches, and its state."""
        return (
            [self._of_worker(worker) for worker in self.order.progress.workers] if self.tells_readers else []
        )

    def _of_worker(self, worker: WorkerProgress) -> tuple[int, dict[str, Any] | None]:
        state = pickle.loads(worker.state) if worker.state else None
        if state and worker.delivered and "generators" not in state:
            state["seed"] = mixed(self.start.base_seed, self.order.progress.delivered)
        return worker.delivered, state

    def end(self, said: Mapping[int, bytes]) -> None:
        """Record that the epoch is over; see `Progress.at_end`."""
        self.order.progress = self.order.progress.at_end(said)

    def left(self) -> tuple[WorkerProgress, ...]:
        """Progress of the readers with which they enter the next epoch. If this one was broken off, it is
        unknown: they have read beyond the delivered batches."""
        progress = self.order.progress
        known = progress.over or not self.order.drawn[0]
        return progress.workers if known else (WorkerProgress(0, UNKNOWN),) * len(progress.workers)


def begin(
    loader: Loader, index_sampler: Any, newest: EpochRecord | None, saved: Saved | None, same_readers: bool
) -> EpochRecord:
    """Create the record of an epoch that begins.

    Args:
        loader: the loader.
        index_sampler: its iterator's: a sampler set later takes effect with the next iterator, as in torch.
        newest: record of the previous epoch; None for the first.
        saved: the state loaded for it, or None.
        same_readers: whether the readers of the previous epoch serve it, too.
    """
    arguments = options.of(loader)
    parts = index_sampler, loader.generator, loader.dataset
    if saved is not None and saved.start.resumes:
        order = Order(*parts, copy.deepcopy(saved.start), saved.progress, saved)
        record = EpochRecord(order, saved, _readers(loader, arguments))
    else:
        order = _whole_order(parts, newest, saved, same_readers)
        record = EpochRecord(order, None, _readers(loader, arguments))
        if saved is not None and saved.start.lives_on and loader.persistent_workers:
            record.continues_workers = loader.num_workers > 0 and not arguments.is_dynamic
            record.start.base_seed = saved.start.base_seed
    record.tells_readers = saved is not None
    record.persistent = loader.persistent_workers or loader.num_workers == 0
    return record


def _whole_order(
    parts: tuple[Any, Any, Any], newest: EpochRecord | None, saved: Saved | None, same_readers: bool
) -> Order:
    """The order of a whole epoch. `parts`: the first arguments of `Order`; see `begin` for the others."""
    epoch, batches, progress, traits = 0, 0, START, None
    if newest is not None:
        # Even if the newest epoch is broken off, this is the next one.
        epoch, batches, traits = newest.start.epoch + 1, newest.shown_position.batches, newest.order.traits
        progress = Progress(workers=newest.left() if same_readers else ())
    if saved is not None:
        epoch, _, batches = saved.position
        progress = Progress(workers=saved.progress.workers)
    return Order(*parts, EpochStart(epoch, batches, resumes=True), progress, traits=traits)


def _readers(loader: Loader, arguments: Options) -> int:
    """Number of dataset readers, if each has a state or a part of the data of its own; else 0."""
    saves = loader.num_workers > 0 and arguments.schedule.save_generators
    if hasattr(loader, "state_dict") and (options.is_iterable(loader) or saves):
        return max(1, int(loader.num_workers))
    return 0
