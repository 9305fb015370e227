"""The iterator without workers: it loads on the thread that calls `next()`.

Runs in the consumer. Uses no process, thread, socket or shared memory; order, random numbers and errors
follow the same rules as with workers.

`SerialIterator.__next__` serves the usual calls itself. Unusual ones go the way of `LoaderIterator.__next__`:
all calls with a device, page-locking, bad samples, a dynamic schedule, a profile, an iterable dataset whose
length was asked for, a loader that has a state or is resumed, samplers that are not torch's, or hints that
are still to come; and the first and the last call of an epoch, and the one after an error or an interrupt.
Each unusual call determines whether the next one may be usual. As with torch, an iterator is for one thread.
"""

from __future__ import annotations

import sys
from typing import Any

from torch.autograd import profiler
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from fastq_loader import options
from fastq_loader.consumer.outcomes import ENDED, Delivered, Ended, Outcome, Raised
from fastq_loader.device.staging import SerialStaging
from fastq_loader.epoch.base import LoaderIterator
from fastq_loader.epoch.resources import Resources
from fastq_loader.errors import IteratorInvalid
from fastq_loader.options import Loader
from fastq_loader.reading import datapipes, generators
from fastq_loader.reading.fetch import EndOfStream, Fetcher, LeftOut
from fastq_loader.reading.reader import Reader
from fastq_loader.scheduling.progress import Progress
from fastq_loader.statistics.records import CUT, ITER, NEXT, NOTHING
from fastq_loader.system.torch_names import untraced
from fastq_loader.system.unpatched import time
from fastq_loader.workers.kinds import Auto

_LEFT_OUT: Any = object()
_NOTHING: Any = object()


@untraced
class SerialIterator(LoaderIterator, _SingleProcessDataLoaderIter):
    """num_workers=0: loads on the consumer's thread."""

    _profile_name = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"

    def __init__(self, loader: Loader, resources: Resources) -> None:
        self._counters = resources.counters
        super().__init__(loader, resources)
        self._dynamic = self._options.is_dynamic
        if self._timeout != 0 and not isinstance(loader.num_workers, Auto):
            raise AssertionError("_SingleProcessDataLoaderIter requires timeout == 0")
        if self._num_workers != 0:
            raise AssertionError("_SingleProcessDataLoaderIter requires num_workers == 0")
        if isinstance(self._dataset, datapipes.GRAPHS):
            datapipes.shard(self._dataset, self._world_size, self._rank)
        self._staging = None
        if self._session is not None:
            self._staging = SerialStaging.of(self._session, resources.stagings, self)
        self._due: tuple[int, Any] | None = None  # number and index of the next batch
        self._busy = False  # in the middle of a step that cannot be repeated
        self._cut: tuple[Any, ...] | None = None  # a call that was cut short: the arguments of `_take_up`
        self._is_unusual = True  # the next call
        self._may_be_usual = not (
            self._dynamic
            or self._finishes
            or self._session is not None
            or self._epoch.bad_samples is not None
            or self._counters.profile is not None
            or self._IterableDataset_len_called is not None
        )
        make_fetcher = Fetcher if self._options.errors is None else options.fetchers(loader)
        rules = {
            "iterable": self._dataset_kind == _DatasetKind.Iterable,
            "auto_collation": self._auto_collation,
            "drop_last": self._drop_last,
        }
        saves = "dataset" if self._epoch.saves else ""
        self._reader = Reader(self._dataset, self._collate_fn, make_fetcher, rules, saves=saves)
        if self._dynamic:
            with generators.restored():
                self._begin_reading()
        else:
            self._begin_reading()
        self._epoch_has_begun(loader, resources)
        self._log.record(ITER, time.monotonic_ns())

    def _begin_reading(self) -> None:
        """Create the fetcher, and advance it to the position where the epoch begins or resumes."""
        record, reader = self._epoch, self._reader
        delivered, state = (record.resume or [(0, None)])[0] if record.saves else (0, None)
        if state is not None:
            state.pop("seed", None)  # the generators of this process are the user's
        if record.saves and record.info.iterable and not self._dynamic and record.saved is None:
            record.note_shared()  # reading draws from them, and again when it is repeated
        reader.sample_seed = record.start.base_seed
        if self._counters.profile is not None:
            reader.sampler = self._counters.profile.sampler()
        reader.begin(record.start.epoch, self._base_seed if self._dynamic else None, delivered, state)
        self._dataset_fetcher = reader.fetcher
        if record.saves:
            record.pass_delivered(reader)

    def _reset(self, loader: Loader, first_iter: bool = False) -> None:
        super()._reset(loader, first_iter)
        self._due, self._busy, self._cut, self._is_unusual = None, False, None, True

    def __next__(self) -> Any:
        if self._is_unusual or self.outcome is not None or profiler._is_profiler_enabled:
            return super().__next__()
        asked, record = time.monotonic_ns(), self._epoch
        index = batch = _NOTHING
        try:
            for index in self._indices:  # after a call of `next`, an interrupt would lose the index
                batch = self._reader.load(record.drawn, index)
                fetched, samples = self._dataset_fetcher.fetched, len(index) if self._auto_collation else 1
                self._log.loaded_here(asked, fetched, time.monotonic_ns(), record.drawn, samples)
                break
            else:
                self._is_unusual = True
        except BaseException as error:
            # Before any call, at which the next interrupt may come.
            self._cut, self._is_unusual = (asked, index, batch), True
            if batch is not _NOTHING or not isinstance(error, Exception):
                raise
            self._cut = asked, index, batch, error
        if batch is _NOTHING:
            return super().__next__()
        record.drawn += 1
        record.in_line += 1
        return batch

    def _advance(self) -> None:
        if self._session is not None:
            self._session.refuse_capture()
        record, log, drawn = self._epoch, self._log, None
        if record.in_line:
            progress = record.progress
            record.reached, record.in_line = progress, 0
        if self._cut is not None:
            drawn = self._take_up(*self._cut)
        elif log.asked:  # the batch before was left out, or an interrupt ended an unusual call
            log.record(CUT, time.monotonic_ns())
        if self.outcome is None:
            if self._busy:
                raise IteratorInvalid("this iterator cannot go on: an interrupt cut a call of next() short")
            log.asked, self._loaded = time.monotonic_ns(), NOTHING
            if self._due is None:
                self._draw()
            drawn = self._due
            if drawn is not None:  # else the sampler has ended, or failed
                self._load_drawn()
        if record.reached.over:
            log.end(time.monotonic_ns(), time.process_time_ns())
        elif self.outcome is not None and log.asked:  # else the batch was left out, or is recorded
            now, index = time.monotonic_ns(), drawn and drawn[1]
            # The error gets no name here: its traceback references this frame.
            log.record(NEXT, now, self._loaded, index, getattr(self.outcome, "error", None))
        if self._may_be_usual and record.is_plain and (self._hints is None or self._hints.due == sys.maxsize):
            self._indices, self._is_unusual = record.source, False

    def _take_up(
        self, asked: int, index: Any, batch: Any, error: Exception | None = None
    ) -> tuple[int, Any] | None:
        """Take up a usual call that an exception ended: store its batch or its error in `outcome`, or the
        number and the index, which it returns, in `_due`."""
        record, log = self._epoch, self._log
        number, now, fetched = record.drawn, time.monotonic_ns(), self._dataset_fetcher.fetched
        outcome: Outcome | None = None
        due, busy = None, False
        if batch is not _NOTHING:
            if log.batches <= number:  # else it is recorded
                log.loaded_here(asked, fetched, now, number, len(index) if self._auto_collation else 1)
            outcome, asked = Delivered(batch, self._progress_after(number)), 0
        elif error is not None:
            outcome = self._outcome_of(error, number, None if index is _NOTHING else index)
            log.wait_from, log.wait_until, log.workers = asked, now, now - asked
            self._loaded = number, -1, 0, asked, asked, fetched, now, now, 0
        else:
            log.asked = asked
            log.record(CUT, now)
            due = number, index
            # An exception, such as an interrupt, ends a generator function: it cannot be resumed.
            busy = index is _NOTHING or self._dataset_kind == _DatasetKind.Iterable
        self.outcome, self._due, self._busy, self._cut = outcome, due, busy, None
        record.drawn, log.asked = number + 1, asked
        return None if index is _NOTHING else (number, index)

    def _outcome_of(self, error: Exception, number: int, index: Any) -> Outcome:
        """The outcome of an error in place of a batch."""
        if not isinstance(error, EndOfStream):
            return self._raised(error, number, index)
        state = self._reader.state_bytes()
        self._epoch.end({0: state} if state else {})
        return ENDED

    def _load_drawn(self) -> None:
        """Store the batch, or the error that loading it raised, in `outcome`; nothing if it was left out."""
        outcome: Outcome | None = None
        too_many = None
        drawn, self._due = self._due, None  # not in the caller: an interrupt may come on entry here
        if drawn is None:  # a signal handler has loaded it meanwhile
            return
        try:
            batch = self._load(*drawn)
            if self._epoch.bad_samples is not None:
                fetcher = self._dataset_fetcher
                remark, fetcher.remark = fetcher.remark, None
                too_many = self._epoch.bad_samples.judge(*drawn, remark)
                del remark
            if too_many is not None:
                outcome = self._raised(too_many, *drawn)
            elif batch is _LEFT_OUT:
                self._epoch.leave_out(self._progress_after(drawn[0]))  # the last call
            else:
                if self._staging is not None:
                    batch = self._stage(self._staging, batch)
                elif self._finishes:
                    batch = self._finished(batch)
                outcome = Delivered(batch, self._progress_after(drawn[0]))
                self._counters.batches += 1
        except BaseException as error:
            self._due = drawn  # before any call, at which the next interrupt may come
            if not isinstance(error, Exception):
                raise
            outcome = self._outcome_of(error, *drawn)
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
        order, began = self._epoch, time.monotonic_ns()
        try:
            index = next(order)
        except StopIteration as stop:
            self.outcome = Ended(stop)
            self._epoch.end({})
        except Exception as error:
            self.outcome = self._raised(error, order.drawn - 1)  # an error takes a position, too
        else:
            self._due = (order.drawn - 1, index)
        self._busy = False
        self._log.drew_until = now = time.monotonic_ns()
        self._log.drew += now - began

    def _raised(self, error: Exception, number: int, index: Any = None) -> Raised:
        """An error to raise in place of a batch."""
        return Raised(error, self._progress_after(number)).at(number, index, None)

    def _progress_after(self, number: int) -> Progress:
        """The progress of the epoch after a batch, or after the error in its place."""
        progress = self._epoch.reached
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
