"""The iterator without workers: it loads on the thread that calls `next()`.

Runs in the consumer. Uses no process, thread, socket or shared memory; order, random numbers and errors
follow the same rules as with workers.
"""

from __future__ import annotations

import threading
from typing import Any

from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from fastq_loader import options
from fastq_loader.consumer.outcomes import ENDED, Ended, Handed, Outcome, Raised
from fastq_loader.device.staging import SerialStaging
from fastq_loader.epoch import resources
from fastq_loader.epoch.base import LoaderIterator
from fastq_loader.errors import IteratorInvalid
from fastq_loader.options import Loader
from fastq_loader.reading import datapipes, generators
from fastq_loader.reading.fetch import EndOfStream, LeftOut
from fastq_loader.reading.reader import Reader
from fastq_loader.scheduling.progress import Progress
from fastq_loader.statistics.records import CUT, GIVEN, ITER, NOTHING
from fastq_loader.system.torch_names import untraced
from fastq_loader.system.unpatched import time
from fastq_loader.workers.kinds import Auto

_LEFT_OUT: Any = object()


@untraced
class SerialIterator(LoaderIterator, _SingleProcessDataLoaderIter):
    """num_workers=0: loads on the consumer's thread."""

    _profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

    def __init__(self, loader: Loader) -> None:
        mine = resources.of(loader)
        self._counters, self._idle = mine.counters, mine.idle
        super().__init__(loader, mine)
        self._dynamic = self._options.is_dynamic
        if self._timeout != 0 and not isinstance(loader.num_workers, Auto):
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if self._num_workers != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires num_workers == 0")
        datapipes.shard(self._dataset, self._world_size, self._rank)
        self._staging = None if self._session is None else SerialStaging.of(self._session, self._idle)
        self._due: tuple[int, Any] | None = None  # number and index of the next batch
        self._lock = threading.RLock()  # threads may share the iterator
        self._busy = False  # in the middle of a step that cannot be repeated
        rules = vars(options.rules(loader))
        saves = "dataset" if self._record.saves else ""
        self._reader = Reader(self._dataset, self._collate_fn, options.fetchers(loader), rules, saves=saves)
        with generators.restored() if self._dynamic else generators.UNTOUCHED:
            self._begin_reading()
        self._epoch_has_begun(loader, mine)
        self._log.record(ITER, time.monotonic_ns())

    def _begin_reading(self) -> None:
        """Create the fetcher, and advance it to the position where the epoch begins or resumes."""
        record, reader = self._record, self._reader
        delivered, state = record.resume[0] if record.resume else (0, None)
        if state is not None:
            state.pop("seed", None)  # the generators of this process are the user's
        if record.info.iterable and not self._dynamic and record.saved is None:
            record.note_shared()  # reading draws from them, and again when it is repeated
        reader.sample_seed = record.start.base_seed
        reader.begin(record.start.epoch, self._base_seed if self._dynamic else None, delivered, state)
        self._dataset_fetcher = reader.fetcher
        record.pass_delivered(reader)

    def __del__(self) -> None:
        staging = getattr(self, "_staging", None)
        if staging is not None:
            self._idle.append(staging)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._due, self._busy = None, False

    def _advance(self) -> None:
        if self._session is not None:
            self._session.refuse_capture()
        with self._lock:
            if self._busy:
                raise IteratorInvalid("this iterator cannot go on: an interrupt cut a call of next() short")
            if self.outcome is not None:  # another thread's, which has not taken it yet
                return
            log, now = self._log, time.monotonic_ns()
            if log.asked:  # an interrupt ended the call before, or its batch was left out
                log.record(CUT, now)
            log.asked, self._loaded = now, NOTHING
            if self._due is None:
                self._draw()
            drawn = self._due
            if drawn is not None:  # else the sampler has ended, or failed
                self._load_drawn()
            if self._record.progress.over:
                log.end(time.monotonic_ns(), time.process_time_ns())
            elif self.outcome is not None:  # else the batch was left out
                now, index = time.monotonic_ns(), drawn and drawn[1]
                # The error gets no name here: its traceback references this frame.
                log.record(GIVEN, now, self._loaded, index, getattr(self.outcome, "error", None))

    def _load_drawn(self) -> None:
        """Store the batch, or the error that loading it raised, in `outcome`; nothing if it was left out."""
        outcome: Outcome | None = None
        too_many = None
        drawn, self._due = self._due, None  # not in the caller: an interrupt may come on entry here
        if drawn is None:  # a signal handler has loaded it meanwhile
            return
        try:
            batch = self._load(*drawn)
            if self._record.bad_samples is not None:
                fetcher = self._dataset_fetcher
                remark, fetcher.remark = fetcher.remark, None
                too_many = self._record.bad_samples.judge(*drawn, remark)
                del remark
            if too_many is not None:
                outcome = self._raised(too_many, *drawn)
            elif batch is _LEFT_OUT:
                self._record.progress = self._progress_after(drawn[0])  # the last call
            else:
                if self._staging is not None:
                    batch = self._stage(self._staging, batch)
                elif self._finishes:
                    batch = self._finished(batch)
                outcome = Handed(batch, self._progress_after(drawn[0]))
                self._counters.batches += 1
        except EndOfStream:
            outcome, said = ENDED, self._reader.state_bytes()
            self._record.end({0: said} if said else {})
        except BaseException as error:
            self._due = drawn  # before any call, at which the next interrupt may come
            if not isinstance(error, Exception):
                raise
            outcome = self._raised(error, *drawn)
        self.outcome, self._due, self._busy = outcome, None, False
        del outcome, too_many  # an error's traceback references this frame

    def _stage(self, staging: SerialStaging, batch: Any) -> Any:
        self._busy = True  # a copy to the device is under way
        began = time.monotonic_ns()
        batch = staging.deliver(staging.begin(batch))
        self._log.device_until = now = time.monotonic_ns()
        self._log.device += now - began
        return batch

    def _draw(self) -> None:
        """Store the number and index of the next batch in `_due`, or the sampler's error in `outcome`."""
        self._busy = True
        order, began = self._record, time.monotonic_ns()
        try:
            index = next(order)
        except StopIteration as stop:
            self.outcome = Ended(stop)
            self._record.end({})
        except Exception as error:
            self.outcome = self._raised(error, order.drawn - 1)  # an error takes a position, too
        else:
            self._due = (order.drawn - 1, index)
        self._busy = False
        self._log.drew_until = now = time.monotonic_ns()
        self._log.drew += now - began

    def _raised(self, error: Exception, number: int, index: Any = None) -> Raised:
        """The outcome of an error in place of a batch."""
        return Raised(error, self._progress_after(number)).at(number, index, None)

    def _progress_after(self, number: int) -> Progress:
        """The progress of the epoch after a batch, or after the error in its place."""
        progress = self._record.progress
        if not progress.workers:
            return progress.after(number)
        iterable = self._dataset_kind == _DatasetKind.Iterable
        return progress.after_worker(0, self._reader.state_bytes(), None if iterable else number)

    def _load(self, number: int, index: Any) -> Any:
        """Load a batch. Return `_LEFT_OUT` if it was left out."""
        began = time.monotonic_ns()
        # An exception, such as an interrupt, ends a generator function: it cannot be resumed.
        self._busy = self._dataset_kind == _DatasetKind.Iterable
        try:
            if self._dynamic:
                with generators.restored():  # seeded as in workers
                    return self._reader.load(number, index)
            return self._reader.load(number, index)
        except LeftOut:
            return _LEFT_OUT
        finally:
            log, ended = self._log, time.monotonic_ns()
            log.wait_from, log.wait_until, log.workers = began, ended, ended - began
            self._loaded = number, -1, 0, began, began, self._dataset_fetcher.fetched, ended, ended, 0
