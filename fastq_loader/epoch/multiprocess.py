"""The iterator over a pool of workers.

Runs in the consumer, on the thread that calls `next()`. Owns no worker: `consumer.pool` does.
"""

from __future__ import annotations

from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from fastq_loader import options
from fastq_loader.consumer.event_loop import EventLoop
from fastq_loader.consumer.outcomes import Ended
from fastq_loader.consumer.pool import EXHAUSTED, Over, Pool
from fastq_loader.epoch.base import LoaderIterator
from fastq_loader.epoch.resources import of as resources_of
from fastq_loader.options import Loader
from fastq_loader.reading import datapipes
from fastq_loader.statistics.records import CLOSE, ITER
from fastq_loader.system.torch_names import untraced
from fastq_loader.system.unpatched import time
from fastq_loader.workers.kinds import Auto


@untraced
class MultiprocessIterator(LoaderIterator, _MultiProcessingDataLoaderIter):
    """One epoch of a pool of workers.

    With persistent workers the pool serves one epoch after the other, and lives as long as any iterator
    refers to it; otherwise this iterator is its only owner, and closes it when it is exhausted or dropped.
    """

    _profile_name = "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"
    pool: Pool
    entrance: Pool | Over
    # In place of torch's, which ends the workers: they may be serving another iterator's epoch. It does
    # nothing, in C: a function in Python would handle signals at its entry, where their exceptions are lost.
    __del__ = object.__init__

    def __init__(self, loader: Loader) -> None:
        resources = resources_of(loader)
        super().__init__(loader, resources)
        self._prefetch_factor = loader.prefetch_factor
        self._in_order = loader.in_order
        self._worker_init_fn = datapipes.sharding_init_fn(self._dataset, loader.worker_init_fn)
        if self._num_workers <= 0:
            raise AssertionError("num_workers must be greater than 0 for MultiProcessingDataLoaderIter")
        if self._prefetch_factor <= 0:
            raise AssertionError("prefetch_factor must be greater than 0 for MultiProcessingDataLoaderIter")
        for_device, saves = resources.session is not None, self._epoch.saves
        plan = options.plan(loader, for_device, saves, resources.grace, resources.interpreters)
        self.pool = Pool(
            plan, self._epoch.pool_seed, self._shared_seed, resources.counters, resources.session
        )
        resources.pools.add(self.pool)
        shared_seed = self._shared_seed
        if not (self._options.is_dynamic or self._epoch.continues_workers):
            # torch resets a new iterator, which draws once more: it calls iter() of the sampler a second
            # time, and draws a second seed for a datapipe graph, which this epoch does not use. A dynamic
            # schedule draws as without workers.
            super()._reset(loader, first_iter=True)
        self._start_epoch(loader, shared_seed)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        if not self.pool.usable:
            self.pool.close("a new iteration began")
            if not isinstance(loader.num_workers, Auto):
                loader.check_worker_number_rationality()
            MultiprocessIterator.__init__(self, loader)
            return
        super()._reset(loader, first_iter)
        if self._options.is_dynamic:
            self._base_seed = self._epoch.draw_base_seed(loader.generator)
        else:
            self._epoch.follow_base_seed(self._base_seed)
        self._start_epoch(loader, self._shared_seed)

    def _start_epoch(self, loader: Loader, shared_seed: int | None) -> None:
        record = self._epoch
        record.start.shared_seed = shared_seed
        record.start.lives_on = self._persistent_workers and not self._options.is_dynamic
        self.pool.start_epoch(self, record)
        self._epoch_has_begun(loader, resources_of(loader))
        record.log.record(ITER, time.monotonic_ns())

    def successor(self) -> MultiprocessIterator:
        """The iterator of the next epoch, not reset yet. It is another object, so that `next()` on this one
        can raise; in torch both epochs share one iterator and lose batches."""
        successor = object.__new__(type(self))
        vars(successor).update(vars(self))
        return successor

    def _advance(self) -> None:
        if self._session is not None:
            self._session.refuse_capture()
        self.entrance.call(self, EventLoop.next, self, self._finished if self._finishes else None)
        if isinstance(self.outcome, Ended):
            self._end()

    def _end(self) -> None:
        """The epoch is over, or a worker's failure has ended it. May be called again after an interrupt."""
        if self.entrance is self.pool:
            if not self._epoch.progress.over:
                self._epoch.end(self.pool.end_states())
            self.entrance = EXHAUSTED
        if not self._persistent_workers and self.pool.usable:
            self.pool.close("it was exhausted")
            self._log.record(CLOSE, time.monotonic_ns())

    def poll(self) -> None:
        if self._session is not None and self.entrance is not EXHAUSTED:
            self._session.refuse_capture()
            self.entrance.call(self, EventLoop.poll)

    # ---- attributes and methods that other packages use ---------------------------------------

    @property
    def _workers(self) -> list[BaseProcess]:  # type: ignore[override]
        """All processes that were started, also after they have ended."""
        return self.pool.processes()

    @property
    def _shutdown(self) -> bool:  # type: ignore[override]
        return self.pool.gate.reason is not None

    def _shutdown_workers(self) -> None:
        self.pool.close("_shutdown_workers() was called", wait=True)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{type(self).__name__!r} object has no attribute {name!r}: no code of torch's iterators runs, "
            "so their queues and tasks do not exist"
        )

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError("torch's queues and tasks do not exist: no code of torch's iterators runs")

    _get_data = _try_get_data = _try_put_index = _process_data = _refuse
    _mark_worker_as_unavailable = _register_persistent_workers_atexit = _refuse
