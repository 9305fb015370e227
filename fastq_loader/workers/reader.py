"""The user's objects in a worker: the dataset and its functions, their seeds, and the batches they give.

Runs in a worker, on its main thread. Random numbers are seeded once in each worker, as in torch, or anew for
each batch. Of an epoch that was broken off torch's workers load whatever was dispatched; `is_missed` says
whether the random numbers that come after could tell.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data._utils import worker as torch_worker

from fastq_loader.reading import datapipes, seeding
from fastq_loader.reading.fetch import EndOfStream, Fetcher, make_fetcher
from fastq_loader.workers.config import Setup


class Reader:
    """What one worker loads batches from.

    Args:
        setup: the worker's.

    Attributes:
        epochs: how many were begun.
        failure: what user code raised when it was to start or to begin an epoch: there is nothing to load.
        ended: nothing more is to be loaded in this epoch.
    """

    def __init__(self, setup: Setup) -> None:
        self.epochs = 0
        self.failure: Exception | None = None
        self.ended = False
        self._setup = setup
        self._base_seed: int | None = None  # every batch is seeded from it; None: once for each worker
        self._dataset: Any = None
        self._collate_fn: Any = None
        self._fetcher: Fetcher | None = None
        self._fetched = False  # anything since the worker was started
        try:
            self._start()
        except Exception as error:
            self.failure = error
        # Of every generator that user code may draw from, before it did.
        self._untouched = self._random_states() if setup.plan.persistent else ()

    def _start(self) -> None:
        setup = self._setup
        torch.set_num_threads(1)
        seed = seeding.seed_worker(setup.base_seed, setup.worker)
        parts = setup.plan.payload.open()
        self._dataset = datapipes.apply_seed(parts["dataset"], setup.shared_seed)
        self._collate_fn = parts["collate_fn"]
        # User code asks torch for it: torch.utils.data.get_worker_info().
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=setup.worker, num_workers=setup.plan.workers, seed=seed, dataset=self._dataset
        )
        if parts["worker_init_fn"] is not None:
            parts["worker_init_fn"](setup.worker)

    def begin_epoch(self, base_seed: int | None, shared_seed: int | None) -> None:
        """Make the fetcher of an epoch, whose batches are seeded from `base_seed` if there is one."""
        self.ended = False
        self.epochs += 1
        self._base_seed = base_seed
        if base_seed is not None:
            seeding.seed_worker(base_seed, self._setup.worker)  # for what iter(dataset) draws
        if self.failure is not None:
            return
        try:
            if self.epochs > 1:
                self._dataset = datapipes.apply_seed(self._dataset, shared_seed)
            rules = vars(self._setup.plan.rules)
            self._fetcher = make_fetcher(self._dataset, collate=self._collate_fn, **rules)
        except Exception as error:
            self.failure = error

    def load(self, seq: int, index: Any) -> Any:
        """Batch number `seq` of the epoch.

        Raises:
            EndOfStream: an iterable dataset has no further one.
            Exception: whatever user code raises.
        """
        assert self._fetcher is not None, "an epoch comes before its tasks"
        if self._base_seed is not None:
            seed = seeding.seed_batch(self._base_seed, seq)
            # torch's class lets nobody set its attributes; who asked for it before sees the new seed too.
            object.__setattr__(torch_worker._worker_info, "seed", seed)
        self._fetched = True
        try:
            return self._fetcher.fetch(index)
        except EndOfStream:
            self.ended = True
            raise

    def is_missed(self) -> bool:
        """Whether a batch that nobody will get has to be loaded all the same. torch's workers load whatever
        was dispatched, which decides on what the next epoch draws. Where nothing was ever drawn from any
        generator, nobody can tell; the first batch of all has to show it."""
        if self._base_seed is not None or self.ended or self.failure is not None:
            return False
        if not self._fetched or getattr(self._fetcher, "dataset_iter", None) is self._dataset:
            return True  # a dataset that is its own iterator goes on where it stopped
        return self._random_states() != self._untouched

    def _random_states(self) -> tuple[Any, ...]:
        return seeding.states(self._dataset, self._collate_fn)
