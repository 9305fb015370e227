"""What all iterators of a loader have in common, and the one over a pool of workers; `serial` has the other.

Runs in the consumer. An iterator knows the loader's arguments, the order in which torch draws random
numbers, the warnings about lengths, and pinning; everything about workers is the engine's.

Both are subclasses of torch's iterators, because code outside tests for those classes and reads their
attributes. Nothing of torch's runs in them: every method is ours, and the attributes have torch's names and
meaning (torch/utils/data/dataloader.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch.autograd import profiler
from torch.utils.data._utils.pin_memory import pin_memory
from torch.utils.data.dataloader import (
    _BaseDataLoaderIter,
    _DatasetKind,
    _MultiProcessingDataLoaderIter,
)

from fastq_loader import arguments, datapipes, sampling
from fastq_loader.delivery import END, Outcome
from fastq_loader.engine import Engine
from fastq_loader.errors import IteratorInvalid, warn_user
from fastq_loader.link import apply
from fastq_loader.messages import spell_out
from fastq_loader.transforms import copy_into

if TYPE_CHECKING:
    from fastq_loader.loader import DataLoader

#: What torch's iterators with workers have, and ours could only pretend to.
_MACHINERY = frozenset(
    (
        "_data_queue",
        "_index_queues",
        "_pin_memory_thread",
        "_rcvd_idx",
        "_send_idx",
        "_task_info",
        "_tasks_outstanding",
        "_worker_pids_set",
        "_worker_queue_idx_cycle",
        "_worker_result_queue",
        "_workers_done_event",
        "_workers_num_tasks",
        "_workers_status",
    )
)


def draw_base_seed(generator: torch.Generator | None) -> int:
    """The seed of an iteration: exactly one `int64.random_()`, as torch draws it."""
    return int(torch.empty((), dtype=torch.int64).random_(generator=generator).item())


class LoaderIterator(_BaseDataLoaderIter, Iterator[Any]):
    """What both kinds have in common.

    Args:
        loader: whose arguments hold.
    """

    _profile_name = ""
    _base_seed: int

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._dataset = loader.dataset
        self._pg = None
        self._share_seed(loader)
        self._dataset_kind = loader._dataset_kind
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        self._auto_collation = loader._auto_collation
        self._drop_last = loader.drop_last
        self._index_sampler = loader._index_sampler
        self._num_workers = loader.num_workers
        self._world_size, self._rank = datapipes.ranks()
        self._link = loader._find_way_to_device()
        #: With device="cpu" the host is where a transform for the device runs.
        self._transform = loader.device_transform if self._link is None else None
        # What goes to a device is page-locked on its way there.
        self._pin_memory, self._pin_memory_device = (
            arguments.pinning(loader) if self._link is None else (False, None)
        )
        self._timeout = loader.timeout
        self._collate_fn = loader.collate_fn
        self._dynamic = loader.schedule == "dynamic"
        self._restart_sampler()
        self._base_seed = draw_base_seed(loader.generator)
        self._persistent_workers = loader.persistent_workers
        self._num_yielded = 0
        self.outcome: Outcome | None = None  # what `next()` gives next, once it is there

    def __iter__(self) -> LoaderIterator:
        return self

    def __len__(self) -> int:
        return len(self._index_sampler)

    def __getstate__(self) -> NoReturn:
        # torch's error and type: an iterator is tied to its processes and cannot move to another.
        raise NotImplementedError("{} cannot be pickled", type(self).__name__)

    def __next__(self) -> Any:
        # A handler of a signal may raise wherever there is a call. So an outcome is put down where it comes
        # about, and from where it is taken here to the end there is none: what was made is never lost.
        outcome, self.outcome = self.outcome, None
        while outcome is None:  # another thread may be quicker to take it
            if profiler._is_profiler_enabled:
                with profiler.record_function(self._profile_name):
                    self._advance()
            else:
                self._advance()
            outcome, self.outcome = self.outcome, None
        if outcome.error is not None:
            try:
                raise outcome.error
            finally:
                del outcome  # the error holds this frame by its traceback
        self._num_yielded += 1
        length = self._IterableDataset_len_called
        if length is not None and self._num_yielded > length and self._dataset_kind == _DatasetKind.Iterable:
            self._warn_about_length(length, outcome)
        return outcome.batch

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

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        """Begin a new epoch. A persistent loader calls it for whatever `_get_iterator` returned, so wrappers
        forward it."""
        self.outcome = None
        self._restart_sampler()
        self._num_yielded = 0
        self._IterableDataset_len_called = loader._IterableDataset_len_called
        self._share_seed(loader)

    def _share_seed(self, loader: DataLoader[Any]) -> None:
        self._shared_seed = datapipes.draw_shared_seed(self._dataset, loader.generator)
        self._dataset = datapipes.apply_seed(self._dataset, self._shared_seed)

    @abstractmethod
    def _restart_sampler(self) -> None: ...

    def _next_index(self) -> Any:
        return next(self._sampler_iter)

    def _next_data(self) -> Any:
        """The next batch, not counted."""
        batch = next(self)
        self._num_yielded -= 1
        return batch

    @abstractmethod
    def _advance(self) -> None:
        """Put the next outcome down in `outcome`."""

    def _finished(self, batch: Any) -> Any:
        """What a batch that stays on the host goes through last."""
        batch = apply(self._transform, batch)
        return pin_memory(batch, self._pin_memory_device) if self._pin_memory else batch  # type: ignore[no-untyped-call]

    def _warn_about_length(self, length: int, outcome: Outcome) -> None:
        text = (
            f"Length of IterableDataset {self._dataset} was reported to be {length}"
            f"(when accessing len(dataloader)), but {self._num_yielded} samples have been fetched. "
        )
        if self._num_workers > 0:
            text += (
                "For multiprocessing data-loading, this could be caused by not properly configuring the "
                "IterableDataset replica at each worker. Please see "
                "https://pytorch.org/docs/stable/data.html#torch.utils.data.IterableDataset for examples."
            )
        self.outcome = outcome  # it is on its way, and this is a call
        try:
            warn_user(text, UserWarning)
        except Warning:  # made an error; torch has lost the batch then
            self.outcome = None
            raise
        self.outcome = None


class WorkerIterator(LoaderIterator, _MultiProcessingDataLoaderIter):
    """One epoch of a pool of workers.

    With persistent workers the pool serves one epoch after the other, and lives as long as an iterator that
    knows it; otherwise this iterator is its only owner, and takes it down when it is exhausted or dropped.
    """

    _profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    engine: Engine

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        self._worker_init_fn = datapipes.sharding_init_fn(self._dataset, loader.worker_init_fn)
        if self._num_workers <= 0:
            raise AssertionError("num_workers must be greater than 0 for MultiProcessingDataLoaderIter")
        if self._prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        self.engine = loader._start_engine(self._base_seed, self._shared_seed)
        self._exhausted = False
        if self._dynamic:  # the draws are those without workers
            self._epoch = self.engine.start_epoch(self._source, self._shared_seed, self._base_seed)
        else:
            # torch resets a new iterator, and draws once more: a second iter() of the sampler, and a second
            # seed for a graph, which is not used in this epoch.
            shared_seed = self._shared_seed
            super()._reset(loader, first_iter=True)
            self._epoch = self.engine.start_epoch(self._source, shared_seed)

    def _reset(self, loader: DataLoader[Any], first_iter: bool = False) -> None:
        loader._find_way_to_device()  # which ends the workers if another device was asked for
        if not self.engine.usable:
            self.engine.close("a new iteration began")
            loader.check_worker_number_rationality()
            WorkerIterator.__init__(self, loader)
            return
        super()._reset(loader, first_iter)
        self._exhausted = False
        if self._dynamic:
            self._base_seed = draw_base_seed(loader.generator)
            self._epoch = self.engine.start_epoch(self._source, self._shared_seed, self._base_seed)
        else:
            self._epoch = self.engine.start_epoch(self._source, self._shared_seed)

    def successor(self) -> WorkerIterator:
        """The iterator of the next epoch, to be reset. Its own object, so that `next()` on this one can say
        that it has ended, where torch's two epochs would share one iterator and lose batches."""
        successor = object.__new__(type(self))
        vars(successor).update(vars(self))
        return successor

    def _restart_sampler(self) -> None:
        self._source = sampling.iterate_packed(self._index_sampler)
        self._spelled: Iterator[Any] = map(spell_out, self._source)

    def _advance(self) -> None:
        if self._link is not None:
            self._link.refuse_capture()
        if not (self._exhausted or self.engine.failed):
            try:
                self.engine.advance(self._epoch, self, self._finished)
            except IteratorInvalid:
                if not self._exhausted:  # else another thread has come to the end meanwhile
                    raise
        if self._exhausted or self.engine.failed:
            self.outcome = self.outcome or END
        if self.outcome is END:
            self._exhausted = True
            if not self._persistent_workers:
                self.engine.close("it was exhausted")

    def poll(self) -> None:
        if self._link is not None and not self._exhausted:
            self._link.refuse_capture()
            self.engine.poll(self._epoch)

    # ---- what code outside reads and calls ----------------------------------------------------

    @property
    def _sampler_iter(self) -> Iterator[Any]:
        return self._spelled

    @_sampler_iter.setter
    def _sampler_iter(self, indices: Iterator[Any]) -> None:
        self._spelled = self._source.drawn = indices

    @property
    def _workers(self) -> list[BaseProcess]:  # type: ignore[override]
        """The processes, so far as they were started; also after they have ended."""
        return self.engine.processes()

    @property
    def _shutdown(self) -> bool:  # type: ignore[override]
        return self.engine.closed is not None

    def _shutdown_workers(self) -> None:
        self.engine.close("_shutdown_workers() was called", wait=True)

    def __getattr__(self, name: str) -> Any:
        if name in _MACHINERY:
            raise AttributeError(f"{name} is torch's machinery, and nothing of that runs under this iterator")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("torch's queues and tasks are not there: nothing of torch's iterators runs")

    _get_data = _try_get_data = _try_put_index = _process_data = _refuse
    _mark_worker_as_unavailable = _register_persistent_workers_atexit = _refuse

    def __del__(self) -> None:
        """Not torch's, which ends the workers: they may be at an epoch that another iterator is for. They end
        with the engine, when nobody knows it any more."""
