"""The iterators that `iter(loader)` gives out: one over a pool of workers, one that loads by itself.

Runs in the consumer. An iterator knows the loader's arguments, the order in which torch draws random
numbers, the warnings about lengths, and pinning; everything about workers is the engine's.
"""

from __future__ import annotations

import time
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import profiler
from torch.utils.data._utils.pin_memory import pin_memory

from fastq_loader import datapipes, sampling, seeding
from fastq_loader.engine import Engine
from fastq_loader.fetch import EndOfStream, make_fetcher
from fastq_loader.link import apply
from fastq_loader.staging import SerialStaging
from fastq_loader.transforms import copy_into

if TYPE_CHECKING:
    from fastq_loader.loader import DataLoader


def draw_base_seed(generator: torch.Generator | None) -> int:
    """The seed of an iteration: exactly one `int64.random_()`, as torch draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class LoaderIterator(Iterator[Any]):
    """What both kinds have in common.

    Args:
        loader: whose arguments hold.
    """

    _profile_name = ""
    _pin_device: str | None

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._iterable = loader._iterable
        self._dataset = loader.dataset
        self._index_sampler = loader._index_sampler
        self._length = loader._IterableDataset_len_called
        self._workers = loader.num_workers
        self._yielded = 0
        self._link = loader._link
        #: With device="cpu" the host is where a transform for the device runs.
        self._transform = loader.device_transform if self._link is None else None

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __getstate__(self) -> NoReturn:
        # torch's error and type: an iterator is tied to its processes and cannot move to another.
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    def __next__(self) -> Any:
        if profiler._is_profiler_enabled:
            with profiler.record_function(self._profile_name):
                return self._next_and_count()
        return self._next_and_count()

    def poll(self) -> None:
        """Begin the copies of batches that have become ready since the last `next()`. With a `device`, for
        loops whose steps take so long that workers fall idle and copies begin late; waits for nothing."""

    def copy_into(self, static_batch: Any) -> None:
        """Take the next batch, and copy it into the tensors that a captured step reads; see
        `fastq_loader.copy_into`.

        Raises:
            StopIteration: there is none.
            ValueError: its structure, shapes or dtypes differ; the batch is gone.
        """
        copy_into(static_batch, next(self))

    def _next_and_count(self) -> Any:
        if self._link is not None:
            self._link.refuse_capture()
        batch = self._next_batch()
        self._yielded += 1
        if self._iterable and self._length is not None and self._yielded > self._length:
            self._warn_about_length()
        return batch

    @abstractmethod
    def _next_batch(self) -> Any: ...

    def _finished(self, batch: Any) -> Any:
        """What a batch that stays on the host goes through last."""
        batch = apply(self._transform, batch)
        return batch if self._pin_device is None else pin_memory(batch, self._pin_device)  # type: ignore[no-untyped-call]

    def _warn_about_length(self) -> None:
        text = (
            f"Length of IterableDataset {self._dataset} was reported to be {self._length}"
            f"(when accessing len(dataloader)), but {self._yielded} samples have been fetched. "
        )
        if self._workers > 0:
            text += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        warnings.warn(text, stacklevel=4)


class SerialIterator(LoaderIterator):
    """num_workers=0: loads on the consumer's thread. No process, thread, socket or shared memory."""

    _profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

    def __init__(self, loader: DataLoader[Any]) -> None:
        shared_seed = datapipes.draw_shared_seed(loader.dataset, loader.generator)
        self._counters = loader._counters
        self._counters.epochs += 1
        super().__init__(loader)
        self._dataset = datapipes.apply_seed(self._dataset, shared_seed)
        self._sampler = sampling.iterate(self._index_sampler)
        self._pin_device = _pin_device(loader)
        base_seed = draw_base_seed(loader.generator)
        if loader.timeout != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        datapipes.shard(self._dataset, *datapipes.ranks())
        #: Batches are seeded from it, as in workers; None: they share the consumer's own generators.
        self._base_seed = base_seed if loader.schedule == "dynamic" else None
        self._idle = loader._idle
        self._staging = None if self._link is None else SerialStaging.of(self._link, self._idle)
        self._drawn = 0
        with self._seeded(lambda seed: seeding.seed_worker(seed, 0)):  # for what iter(dataset) draws
            self._fetcher = make_fetcher(
                self._dataset,
                iterable=self._iterable,
                auto_collation=loader._auto_collation,
                collate=loader.collate_fn,
                drop_last=loader.drop_last,
            )

    def __del__(self) -> None:
        staging = getattr(self, "_staging", None)
        if staging is not None:
            self._idle.append(staging)

    @contextmanager
    def _seeded(self, seed: Callable[[int], int]) -> Iterator[None]:
        if self._base_seed is None:
            yield
        else:
            with seeding.put_back():
                seed(self._base_seed)
                yield

    def _next_batch(self) -> Any:
        began = time.monotonic_ns()
        number = self._drawn
        self._drawn += 1  # also when the sampler fails: its error has a place
        index = next(self._sampler)
        try:
            if self._base_seed is None:
                batch = self._fetcher.fetch(index)
            else:
                with self._seeded(lambda seed: seeding.seed_batch(seed, number)):
                    batch = self._fetcher.fetch(index)
        except EndOfStream:
            raise StopIteration from None
        finally:
            self._counters.wait_ns += time.monotonic_ns() - began
        self._counters.batches += 1
        return self._finished(batch) if self._staging is None else self._staging.stage(batch)


class WorkerIterator(LoaderIterator):
    """One epoch of a pool of workers.

    With persistent workers the pool belongs to the loader and serves one iterator after the other;
    otherwise this iterator is its only owner, and takes it down when it is exhausted or dropped.
    """

    _profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    engine: Engine

    def __init__(self, loader: DataLoader[Any], previous: WorkerIterator | None) -> None:
        shared_seed = datapipes.draw_shared_seed(loader.dataset, loader.generator)
        super().__init__(loader)
        self._exhausted = False
        self._persistent = loader.persistent_workers
        if loader.schedule == "dynamic":
            self._start_dynamic(loader, previous, shared_seed)
        else:
            self._start_as_torch(loader, previous, shared_seed)

    def _start_dynamic(
        self, loader: DataLoader[Any], previous: WorkerIterator | None, shared_seed: int | None
    ) -> None:
        # The order of the draws is the one without workers, whether there is a pool already or not.
        sampler = sampling.iterate_packed(self._index_sampler)
        self._pin_device = previous._pin_device if previous is not None else _pin_device(loader)
        base_seed = draw_base_seed(loader.generator)
        if previous is not None:
            self.engine = previous.engine
        else:
            self.engine = Engine(loader._plan(), base_seed, shared_seed, loader._counters, self._link)
        self._epoch = self.engine.start_epoch(sampler, shared_seed, base_seed)

    def _start_as_torch(
        self, loader: DataLoader[Any], previous: WorkerIterator | None, shared_seed: int | None
    ) -> None:
        # The order of the draws is torch's: the graph's seed, the sampler's iter(), the base seed, the
        # workers, and a second iter() of the sampler. A pool that is there already takes a shorter way.
        if previous is not None:
            engine, self._pin_device = previous.engine, previous._pin_device
        else:
            self._pin_device = _pin_device(loader)
            iter(self._index_sampler)
            engine = Engine(
                loader._plan(), draw_base_seed(loader.generator), shared_seed, loader._counters, self._link
            )
        self.engine = engine
        sampler = sampling.iterate_packed(self._index_sampler)
        if previous is None:
            # torch draws once more when it resets a new iterator, and does not use it in this epoch.
            datapipes.draw_shared_seed(loader.dataset, loader.generator)
        self._epoch = engine.start_epoch(sampler, shared_seed)

    def _next_batch(self) -> Any:
        if self._exhausted:
            raise StopIteration
        try:
            batch = self.engine.next_batch(self._epoch)
        except StopIteration:
            self._exhausted = True
            if not self._persistent:
                self.engine.close("it was exhausted")
            raise
        except Exception:
            self._exhausted = self.engine.failed
            raise
        return self._finished(batch)

    def poll(self) -> None:
        if self._link is not None and not self._exhausted:
            self._link.refuse_capture()
            self.engine.poll(self._epoch)


def _pin_device(loader: DataLoader[Any]) -> str | None:
    """The device to pin for, with torch's warnings; None: do not pin."""
    if not loader.pin_memory or loader._link is not None:
        return None
    if loader.pin_memory_device:
        warnings.warn(
            "pin_memory_device is deprecated, the current accelerator will be used as the device,"
            f"ignore pin_memory_device='{loader.pin_memory_device}'.",
            stacklevel=4,
        )
    if not torch.accelerator.is_available():
        warnings.warn(
            "'pin_memory' argument is set as true but no accelerator is found, "
            "then device pinned memory won't be used.",
            stacklevel=4,
        )
        return None
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    if accelerator.type == "mps":
        warnings.warn(
            "'pin_memory' argument is set as true but not supported on MPS now, "
            "device pinned memory won't be used.",
            stacklevel=4,
        )
        return None
    return accelerator.type
