"""The user's objects in a worker: the dataset and its functions, their seeds, and the batches they give.

Runs in a worker, on its main thread. Random numbers are seeded once in each worker, as in torch, or anew for
each batch. Of an epoch that was broken off torch's workers load whatever was dispatched; `is_missed` says
whether the random numbers that come after could tell.

What a resumed epoch needs from a worker is its state: a dict with what `reading.position` says of the dataset
and, where it was asked for, the states of its generators. It goes to the consumer with each batch and comes
back with the epoch, with the number of this worker's batches that were handed out before. Those are passed
over; where there is no position, they are read again. A state that is "over" is of the end of the epoch
before: the new one begins from there. One that has a "seed" knows of no generators.
"""

from __future__ import annotations

import pickle
import time
from typing import Any, NoReturn

import torch
from torch.utils.data._utils import worker as torch_worker

from fastq_loader.ipc.messages import Epoch, seal, unseal
from fastq_loader.packing.pickling import dump_exception
from fastq_loader.reading import datapipes, generators, position
from fastq_loader.reading.fetch import EndOfStream, Fetcher
from fastq_loader.reading.tolerance import TolerantFetcher
from fastq_loader.workers.config import Setup


class HandedOutBefore(Exception):
    """The batch was handed out before the epoch was resumed."""


class Reader:
    """What one worker loads batches from.

    Args:
        setup: the worker's.

    Attributes:
        epochs: how many were begun.
        failure: what user code raised when it was to start or to begin an epoch: there is nothing to load.
        ended: nothing more is to be loaded in this epoch.
        state: of the worker after the batch that was loaded last, as a sealed pickle; b"" if there is none.
        bad: that batch's samples that could not be read, and what the last one raised, as a sealed pickle of
            `TolerantFetcher.bad` and of what `dump_exception` returns; b"" if there is none.
        timing: of that batch, as `Answer` has it: fetched, collated, slowest, slowest_at.
    """

    def __init__(self, setup: Setup) -> None:
        self.epochs = 0
        self.failure: Exception | None = None
        self.ended = False
        self.state = self.bad = b""
        self.timing = (0, 0, 0, 0)
        self._setup = setup
        self._base_seed: int | None = None  # every batch is seeded from it; None: once for each worker
        self._dataset: Any = None
        self._collate_fn: Any = None
        self._errors: Any = None
        self._fetcher: Fetcher | None = None
        self._fetched = False  # anything since the worker was started
        self._asked = 0  # for a batch, in this epoch
        self._to_pass = 0  # batches of this epoch that were handed out before it was resumed
        self._replays = False  # and have to be read again
        self._resumed: dict[str, Any] = {}  # the state to go on from
        self._number_of_epoch = 0
        try:
            self._start()
        except Exception as error:
            self.failure = error
        # Of every generator that user code may draw from, before it did.
        self._untouched = self._random_states() if setup.plan.persistent else ()

    def _start(self) -> None:
        setup = self._setup
        parts = setup.plan.payload.open()  # before the seeds, as in torch: the user's modules may draw
        torch.set_num_threads(1)
        seed = generators.seed_worker(setup.base_seed, setup.worker)
        self._dataset = datapipes.apply_seed(parts["dataset"], setup.shared_seed)
        self._collate_fn, self._errors = parts["collate_fn"], parts["errors"]
        # User code asks torch for it: torch.utils.data.get_worker_info().
        torch_worker._worker_info = torch_worker.WorkerInfo(
            id=setup.worker, num_workers=setup.plan.workers, seed=seed, dataset=self._dataset
        )
        if parts["worker_init_fn"] is not None:
            parts["worker_init_fn"](setup.worker)

    def begin_epoch(self, epoch: Epoch) -> None:
        """Make the fetcher of an epoch, whose batches are seeded from its base seed if there is one."""
        self.ended = False
        self.state = self.bad = b""
        self.epochs += 1
        self._asked = 0
        self._base_seed, self._number_of_epoch = epoch.base_seed, epoch.number
        if epoch.base_seed is not None:
            generators.seed_worker(epoch.base_seed, self._setup.worker)  # for what iter(dataset) draws
        if self.failure is not None:
            return
        try:
            if self.epochs > 1:
                self._dataset = datapipes.apply_seed(self._dataset, epoch.shared_seed)
            self._resume(epoch.resume)
            rules = {**vars(self._setup.plan.rules), "errors": self._errors}
            place = self._resumed.get("position")
            if "seed" in self._resumed:
                generators.seed_worker(self._resumed["seed"], self._setup.worker)
            if self._resumed.get("over"):
                if place is not None:
                    at_end = {**place, "ended": True}
                    position.fetcher_at(at_end, self._dataset, collate=self._collate_fn, **rules)
                place = None
                self._set_generators()  # `iter(dataset)` may draw
            self._fetcher = position.fetcher_at(place, self._dataset, collate=self._collate_fn, **rules)
            self._set_generators()
        except Exception as error:
            self.failure = error

    def _resume(self, resume: bytes) -> None:
        count, self._resumed = 0, {}
        if resume:
            setup = self._setup
            count, state = pickle.loads(unseal(resume, setup.token))[setup.worker]
            self._resumed = state or {}
        self._to_pass = count if self._setup.plan.rules.iterable else 0
        self._replays = "position" not in self._resumed

    def _set_generators(self) -> None:
        """Not before the batches that are read again: they draw."""
        if self._to_pass and self._replays:
            return
        for name, state in self._resumed.pop("generators", {}).items():
            if name in (own := self._generators()):
                generators.set_state(own[name], state)

    def _generators(self) -> dict[str, Any]:
        own = generators.find({"dataset": self._dataset, "collate_fn": self._collate_fn})
        return {**generators.GLOBAL, **own}

    def load(self, seq: int, index: Any) -> Any:
        """Batch number `seq` of the epoch.

        Raises:
            EndOfStream: an iterable dataset has no further one.
            HandedOutBefore: the epoch was resumed after this batch.
            Exception: whatever user code raises.
        """
        assert self._fetcher is not None, "an epoch comes before its tasks"
        if self._base_seed is not None:
            seed = generators.seed_batch(self._base_seed, self._number(seq))
            # torch's class refuses to have its attributes set; user code that has it sees the new seed too.
            object.__setattr__(torch_worker._worker_info, "seed", seed)
        self._fetched = True
        self._asked += 1
        if self._to_pass:
            self._pass_over(self._fetcher, index)
        fetcher = self._fetcher
        if type(fetcher) is TolerantFetcher:
            fetcher.place = self._number_of_epoch, seq
        try:
            return fetcher.fetch(index)
        except EndOfStream:
            self.ended = True
            raise
        finally:
            self.timing = fetcher.fetched, time.monotonic_ns(), fetcher.slowest, fetcher.slowest_at
            self._say(fetcher)

    def _number(self, seq: int) -> int:
        """What a batch is seeded by: its number. Of an iterable dataset it is the number that it has if no
        worker ends before: how many tasks the others still get depends on when they end."""
        setup = self._setup
        return self._asked * setup.plan.workers + setup.worker if setup.plan.rules.iterable else seq

    def _pass_over(self, fetcher: Fetcher, index: Any) -> NoReturn:
        if self._replays:
            try:
                fetcher.fetch(index)
            except EndOfStream:
                self.ended = True
                raise
            except Exception:  # of user code; it was raised at its position before
                pass
        self._to_pass -= 1
        self._set_generators()
        raise HandedOutBefore

    def _say(self, fetcher: Fetcher) -> None:
        """Keep what the worker goes on from if this was the last batch."""
        more: dict[str, Any] = {}
        if self._setup.plan.save_generators:
            own = self._generators().items()
            more["generators"] = {name: generators.state_of(generator) for name, generator in own}
        if self.ended and (more or position.is_known(fetcher)):
            more["over"] = True
        state = position.packed(fetcher, **more)
        self.state = seal(state, self._setup.token) if state else b""
        self.bad = b""
        if fetcher.error is not None:
            found = fetcher.bad, dump_exception(fetcher.error, self._setup.worker)
            self.bad, fetcher.error = seal(pickle.dumps(found), self._setup.token), None

    def is_missed(self) -> bool:
        """Whether a batch of an epoch that was broken off has to be loaded. torch's workers load whatever
        was dispatched, which decides on what the next epoch draws. Where nothing was ever drawn from any
        generator, it makes no difference; the first batch of all has to show it."""
        if self._base_seed is not None or self.ended or self.failure is not None:
            return False
        if not self._fetched or getattr(self._fetcher, "dataset_iter", None) is self._dataset:
            return True  # a dataset that is its own iterator goes on where it stopped
        return self._random_states() != self._untouched

    def close(self) -> None:
        """The worker ends. The dataset goes with the reader, so that its `__del__` still finds its modules;
        it is in no worker by then (as in torch from 2.14 on)."""
        torch_worker._worker_info = None

    def _random_states(self) -> tuple[Any, ...]:
        return generators.states(self._dataset, self._collate_fn)
