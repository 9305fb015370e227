"""The epoch that a loader is in: where it began, and how far it has come.

Runs in the consumer, on the thread that calls `iter()` and `next()`. Holds neither an iterator nor workers:
`state_dict()` also works when those are gone.
"""

from __future__ import annotations

import hashlib
import pickle
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fastq_loader import arguments
from fastq_loader.arguments import Loader
from fastq_loader.reading import generators
from fastq_loader.reading.position import is_stateful
from fastq_loader.resume.order import Order, Stopped
from fastq_loader.scheduling.progress import START, Progress, WorkerProgress

#: In place of a reader's state that is unknown.
UNKNOWN = pickle.dumps({"unknown": True})


class Position(NamedTuple):
    """How far a loader has come.

    Attributes:
        epoch: epochs that are over.
        batch: batches of the next one that were handed out; with those that raised.
        batches: batches that were handed out in all epochs.

    >>> loader = DataLoader(range(8), 2)
    >>> batches = list(loader)
    >>> loader.position
    Position(epoch=1, batch=0, batches=4)
    """

    epoch: int = 0
    batch: int = 0
    batches: int = 0


@dataclass(frozen=True)
class Saved:
    """A state that was read, and fits its loader.

    Attributes:
        state: as it was given.
        position: where the loader stands with it.
        resumes: whether the next epoch goes on in the middle.
        iterable: whether the dataset is one.
        progress, order, base_seed, shared_seed: of that epoch.
        shared: states of shared generators that a first epoch begins from.
        bad_samples: what `consumer.bad_samples` goes on from, or {}.
        lives_on: whether its workers would have gone on with the next epoch.
    """

    state: dict[str, Any]
    position: Position
    base_seed: int
    lives_on: bool = False
    resumes: bool = False
    iterable: bool = False
    progress: Progress = START
    order: Stopped = field(default_factory=Stopped)
    shared_seed: int | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    bad_samples: dict[str, Any] = field(default_factory=dict)


def mixed(seed: int, *numbers: int) -> int:
    """A seed that follows from another one and has nothing in common with it."""
    packed = struct.pack(f"<{1 + len(numbers)}q", seed, *numbers)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


class EpochRecord:
    """One epoch of a loader.

    Args:
        order: of its indices.
        position: where it begins, or goes on.
        saved: what it was resumed from, or None.
        readers: who reads the dataset, if their progress is of use: one for each worker, or one without
            workers.

    Attributes:
        order: of its indices; `order.progress` is how far it has come.
        began: where it began, or goes on.
        base_seed, shared_seed: see `generators` and `datapipes`.
        continues_workers: it is the next epoch of workers that would have lived on.
        tells_readers: whether its readers have to hear where they stand.
        persistent: its readers go on with the next epoch.
        lives_on: its workers go on with the next epoch, for which torch then draws no base seed.
        constant: see `state.Constant`; None until somebody asks.
        bad_samples: gives what a state has of them; None where they are not counted.
        shown: of one that a `Prefetcher` reads ahead: the state and the position of what that has handed out.
    """

    def __init__(self, order: Order, position: Position, saved: Saved | None, readers: int) -> None:
        self.order = order
        self.saved = saved
        self.base_seed = 0
        self.shared_seed: int | None = None
        self.continues_workers = self.lives_on = self.persistent = False
        self.tells_readers = saved is not None
        self.constant: Any = None
        self.bad_samples: Callable[[], dict[str, Any]] | None = None
        self.shown: tuple[Callable[[], dict[str, Any]], Position] | None = None
        self.began = position
        progress = order.progress
        if saved is not None:
            self.base_seed, self.shared_seed = saved.base_seed, saved.shared_seed
        if readers and not progress.workers:
            order.progress = Progress(progress.delivered, progress.beyond, (WorkerProgress(),) * readers)

    @property
    def progress(self) -> Progress:
        return self.order.progress

    @property
    def over(self) -> bool:
        """It was exhausted."""
        return self.progress.over

    @property
    def position(self) -> Position:
        return self.position_at(self.progress)

    def position_at(self, progress: Progress) -> Position:
        """Where the loader stands when the epoch has come that far."""
        began = self.began
        batches = began.batches - began.batch + progress.delivered
        if progress.over:
            return Position(began.epoch + 1, 0, batches)
        return Position(began.epoch, progress.delivered, batches)

    @property
    def next_position(self) -> Position:
        """Where the next epoch begins, also if this one is broken off."""
        return Position(self.began.epoch + 1, 0, self.shown_position.batches)

    @property
    def shown_position(self) -> Position:
        """As the user knows it, who may read through a `Prefetcher`."""
        return self.position if self.shown is None else self.shown[1]

    # ---- what an iterator asks when it begins -------------------------------------------------

    def draw_base_seed(self, generator: torch.Generator | None) -> int:
        """The seed of the iteration, drawn unless the epoch was resumed."""
        if self.saved is None:
            self.base_seed = generators.draw_base_seed(generator)
        return self.base_seed

    def follow_base_seed(self, seed: int) -> int:
        """The seed of an epoch for which torch draws none, because its workers live on: it follows from that
        of the epoch before."""
        if self.saved is None:
            self.base_seed = mixed(seed, self.began.epoch)
        return self.base_seed

    @property
    def pool_seed(self) -> int:
        """The base seed of new workers. Not what they were seeded from before, if they do not go through
        the same again: they would draw the same random numbers for other samples. If it is known which of
        them have handed out something, those get a seed of their own."""
        progress = self.progress
        if self.saved is None or not progress.delivered or progress.workers:
            return self.base_seed
        return mixed(self.base_seed, progress.delivered)

    @property
    def replayed(self) -> int:
        """Batches of an iterable dataset that have to be read again to come to where the epoch goes on."""
        if self.saved is None or not self.saved.iterable:
            return 0
        return sum(count for count, state in self.resume if "position" not in (state or {}))

    @property
    def resume(self) -> list[tuple[int, dict[str, Any] | None]]:
        """For each worker: the number of its batches that were handed out, and its state."""
        return [self._of_worker(worker) for worker in self.progress.workers] if self.tells_readers else []

    def _of_worker(self, worker: WorkerProgress) -> tuple[int, dict[str, Any] | None]:
        state = pickle.loads(worker.state) if worker.state else None
        if state and worker.delivered and "generators" not in state:
            state["seed"] = mixed(self.base_seed, self.progress.delivered)
        return worker.delivered, state

    def end(self, said: Mapping[int, bytes]) -> None:
        """The epoch is over; see `Progress.at_end`."""
        self.order.progress = self.progress.at_end(said)

    def left(self) -> tuple[WorkerProgress, ...]:
        """Where the readers stand that go on with the next epoch. If this one was broken off, they have read
        more than was handed out, and it is unknown how much."""
        workers = self.progress.workers
        if self.over or not self.order.drawn[0]:
            return workers
        return (WorkerProgress(0, UNKNOWN),) * len(workers)


def begin(
    loader: Loader,
    index_sampler: Any,
    newest: EpochRecord | None,
    saved: Saved | None,
    same_readers: bool = False,
) -> EpochRecord:
    """The record of an epoch that begins.

    Args:
        loader: whose.
        index_sampler: its iterator's: one that is set later counts from the next iterator on, as in torch.
        newest: of the epoch before it; None: it is the first.
        saved: what was loaded for it, or None.
        same_readers: whether those of the epoch before it go on.
    """
    parts = index_sampler, loader.generator, loader.dataset
    dynamic = arguments.is_dynamic(loader)
    ahead = dynamic and loader.num_workers > 0
    if newest is not None and saved is None and not newest.over and dynamic:
        newest.order.break_off()
    if saved is not None and saved.resumes:
        order = Order(*parts, saved.progress, saved.order, ahead=ahead)
        record = EpochRecord(order, saved.position, saved, _readers(loader))
    else:
        position, workers = Position(), START.workers
        if saved is not None:
            position, workers = saved.position, saved.progress.workers
        elif newest is not None:
            position, workers = newest.next_position, newest.left() if same_readers else ()
        traits = None if newest is None else newest.order.traits
        order = Order(*parts, Progress(workers=workers), traits=traits, ahead=ahead)
        record = EpochRecord(order, position, None, _readers(loader))
        record.tells_readers = saved is not None
        if saved is not None and saved.lives_on and loader.persistent_workers:
            record.continues_workers = loader.num_workers > 0 and not dynamic
            record.base_seed = saved.base_seed
    record.persistent = loader.persistent_workers or loader.num_workers == 0
    return record


def _readers(loader: Loader) -> int:
    """Who reads the dataset, if each of them has a state or a part of its own; else 0."""
    saves = loader.num_workers > 0 and arguments.saves_generators(loader)
    if arguments.is_iterable(loader) or is_stateful(loader.dataset) or saves:
        return max(1, int(loader.num_workers))
    return 0
