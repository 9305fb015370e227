"""A trace of a loader: the records of its calls (see `statistics.records`), written to a file as events.

Runs in the consumer, wherever records are folded: on the threads that call `next()`, and on any other thread
that reads the statistics. A trace may end on any thread.

Perfetto opens the file: an array of JSON in the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). A time is written as
nanoseconds with the exponent of a microsecond, "12345e-3", which costs a third of a decimal fraction. Each
worker has a row, and so has each thread that iterates. Spans of one row never overlap in part, because
Perfetto drops such spans. So a span is written when it has ended. Batches in flight and copies may overlap,
so they are asynchronous events, which Perfetto lays out itself.

Perfetto accepts an array without an end. So each write consists of whole events, and is passed to the system
at once. If the consumer is killed, only events that were not written yet are lost.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from os import PathLike

from fastq_loader.errors import shorten
from fastq_loader.ipc.messages import ENDED, LEFT_OUT, PASSED, SKIPPED, Answer
from fastq_loader.statistics import records
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.system import locks, process_id

#: Nanoseconds between two writes, as long as `next()` is called. A consumer that hangs or is killed loses the
#: events after the last write.
_EVERY = 10_000_000
#: First row number for workers on other machines, whose process ids may also exist here: Linux's
#: PID_MAX_LIMIT, above the ids of all threads.
_FAR = 1 << 22
#: Span names of answers without a batch.
_OTHERS = {ENDED: "end of the stream", SKIPPED: "skip", PASSED: "pass over", LEFT_OUT: "leave out"}
#: Span names of calls, and names of the marks at the end of an epoch.
_CALLS = {records.ITER: "iter", records.NEXT: "next", records.CUT: "next", records.END: "next"}
_OVER = {records.END: "ends", records.DROP: "is broken off"}
#: Steps that take time.
_SPANS = records.DREW, records.DEVICE, records.LOADED, records.WAITED

#: Events as they are written, each after the one before it. Others are rare, and `json` writes them.
_SPAN = ',\n{"ph":"X","pid":%d,"tid":%d,"name":"%s","ts":%de-3,"dur":%de-3%s}'
_READY = ',\n{"ph":"C","pid":%d,"name":"ready","ts":%de-3,"args":{"batches":%d}}'

#: Batches in flight of an epoch, with the times when their tasks were sent, and which have arrived.
_Batches = tuple[dict[int, int], set[int]]


@contextmanager
def traced(path: str | PathLike[str], counters: Counters) -> Iterator[None]:
    """Trace a loader while the context lasts; see `DataLoader.trace`.

    Args:
        path: path of the file.
        counters: the loader's counters.

    Raises, when the context begins or ends:
        OSError: the file cannot be written. An error in between ends the trace, and is raised at the end.
        ValueError: another trace is being written to it.
        RuntimeError: the loader is being traced already.
    """
    if counters.traced:
        raise RuntimeError(
            f"this loader is being traced already, so nothing can be written to {os.fspath(path)!r}: end "
            "that trace first, or trace another loader"
        )
    recorder = Recorder(path, counters)
    counters.follow(recorder.fold, identify=threading.get_native_id)
    try:
        yield
    except BaseException:
        with suppress(OSError):  # the other error is more informative
            recorder.end()
        raise
    recorder.end()


def _opened(path: str | PathLike[str]) -> int:
    """Open, lock and empty a file. Locked, because two traces in one file would be unreadable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        locks.lock_file(fd, wait=False)
    except BlockingIOError:
        os.close(fd)
        raise ValueError(
            f"path={os.fspath(path)!r}: another trace is being written to this file; give every loader, and "
            "every rank, a file of its own"
        ) from None
    except OSError:  # not on every file system
        pass
    with suppress(OSError):  # a pipe or a device has nothing to empty
        os.ftruncate(fd, 0)
    return fd


class Recorder:
    """Turns records into events, and writes them to a file. In a forked child it writes nothing.

    Args:
        path: path of the file.
        counters: the loader's counters.

    Attributes:
        origin: time zero of the trace, in nanoseconds of the monotonic clock.
    """

    def __init__(self, path: str | PathLike[str], counters: Counters) -> None:
        self.origin = self._written = time.monotonic_ns()
        self._fd = _opened(path)
        self._counters = counters
        self._failure: OSError | None = None
        self._pid = pid = process_id.current()
        # Reentrant, because a signal handler may end the trace in the middle of a write.
        self._lock = threading.RLock()
        self._over = False
        self._epochs: dict[int, _Batches | None] = {}  # None: its end is in the trace
        self._steps: dict[int, tuple[int, str]] = {}  # thread → when it received a batch, and arguments
        self._far: dict[tuple[int, int, str], int] = {}  # process here, process there, machine → row
        self._named: set[int] = set()  # rows that have a name
        self._asynchronous = 0  # number of asynchronous spans so far
        about = {"name": f"DataLoader (pid {pid})", "origin_ns": self.origin}
        first = {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": about}
        self._events = [f"[\n{json.dumps(first)}"]  # not written yet

    # ---- the file -------------------------------------------------------------------------------

    def _write(self, now: int, after: bytes = b"") -> None:
        """Write the events so far, followed by `after`."""
        if self._pid != process_id.current():  # a forked child: the lock may be another thread's
            self._counters.follow()
            self._events.clear()
            return
        with self._lock:
            if self._over:  # another thread was folding when the trace ended
                return
            events, self._events, self._written = self._events, [], now
            data = "".join(events).encode("ascii") + after
            try:
                while data and self._failure is None:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:  # the trace ends, and `end` raises
                self._failure = error
                self._counters.follow()

    def end(self) -> None:
        """Write the remaining events, and close the file.

        Raises:
            OSError: the file could not be written, now or before.
        """
        if self._failure is None:  # after a failure, another trace may have begun
            self._counters.follow()
        self._write(time.monotonic_ns(), b"\n]\n")
        self._over = True
        if self._pid == process_id.current():
            with suppress(OSError):
                locks.unlock_file(self._fd)  # workers that were forked may have it open for a while
        os.close(self._fd)
        if self._failure is not None:
            raise self._failure

    # ---- rows, spans and marks ------------------------------------------------------------------

    def _event(self, ph: str, row: int, name: str, about: dict[str, object], **more: object) -> None:
        event = {"ph": ph, "pid": self._pid, "tid": row, "name": name, "args": about}
        self._events.append(f",\n{json.dumps(event | more)}")

    def _name_row(self, row: int, name: str, order: int) -> None:
        self._named.add(row)
        self._event("M", row, "thread_name", {"name": name})
        self._event("M", row, "thread_sort_index", {"sort_index": order})

    def _consumer(self, thread: int) -> int:
        thread = thread or threading.get_native_id()  # the trace began in the middle of the call
        if thread not in self._named:
            other = "" if thread == self._pid else f" (thread {thread})"
            self._name_row(thread, f"consumer{other}", 0)
        return thread

    def _worker(self, worker: int, pid: int) -> int:
        """The row of the worker that process `pid` is, or is a proxy of. The row of a local worker has its
        process id as number."""
        if pid in self._named:
            return pid
        row, name, far = pid, f"pid {pid}", self._counters.far_worker(pid)
        if far is not None:
            row = self._far.setdefault((pid, *far), _FAR + len(self._far))
            name = f"pid {far[0]} on {far[1]}" if far[0] else "not up yet"
        if row not in self._named:
            self._name_row(row, f"worker {worker} ({name})", 1 + worker)
        return row

    def _add(self, row: int, name: str, began: int, ended: int, about: str = "") -> None:
        if self.origin <= began <= ended:  # not if the trace began in the middle of it
            since = began - self.origin
            self._events.append(_SPAN % (self._pid, row, name, since, ended - began, about))

    def _add_asynchronous(self, name: str, began: int, ended: int, about: str) -> None:
        """A span that may overlap others of its name."""
        if began >= self.origin:
            self._asynchronous += 1
            which = f'"pid":{self._pid},"cat":"{name}","id":{self._asynchronous},"name":"{name}"'
            for phase, when, more in (("b", began, about), ("e", ended, "")):
                self._events.append(f',\n{{"ph":"{phase}",{which},"ts":{when - self.origin}e-3{more}}}')

    def _mark(self, row: int, name: str, now: int, scope: str = "p", **about: object) -> None:
        if now >= self.origin:
            self._event("i", row, name, about, s=scope, ts=(now - self.origin) / 1000)

    # ---- records --------------------------------------------------------------------------------

    def fold(self, record: records.Record) -> None:
        """Add the events of a record."""
        match record:
            case records.COPY, _, began, ended, _, _, nbytes:
                self._add_asynchronous("copy to the device", began, ended, f',"args":{{"bytes":{nbytes}}}')
            case records.CLOSE, _, began, ended, thread, *_:
                self._add(self._consumer(thread), "end of the workers", began, ended)
            case kind, _, _, ended, *_:
                self._add_call(record)
                if kind in _CALLS and ended - self._written >= _EVERY:
                    self._write(ended)

    def _add_call(self, record: records.Record) -> None:
        kind, epoch, began, ended, thread, steps, *_ = record
        row = self._consumer(thread)
        if epoch not in self._epochs:  # it may have begun before the trace did
            self._epochs[epoch] = None if kind == records.DROP else ({}, set())
        if began and row in self._steps:
            since, which = self._steps.pop(row)
            self._add(row, "step", since, began, which)
        if kind == records.ITER:
            self._mark(row, f"epoch {epoch} begins", began)
        batches = self._epochs[epoch] or ({}, set())
        for step in steps:
            self._add_step(step, epoch, row, batches)
        which = self._add_outcome(record, row, batches) if kind == records.NEXT else _about(epoch)
        if kind in _OVER:
            self._end_epoch(epoch, f"epoch {epoch} {_OVER[kind]}", row, ended)
        if kind in _CALLS:
            ended = _end_of_last(steps, began) if kind == records.CUT else ended
            self._add(row, _CALLS[kind], began, ended, which)

    def _end_epoch(self, epoch: int, text: str, row: int, now: int) -> None:
        if self._epochs[epoch] is not None:
            self._epochs[epoch] = None
            self._mark(row, text, now)
            self._events.append(_READY % (self._pid, now - self.origin, 0))

    def _add_outcome(self, record: records.Record, row: int, batches: _Batches) -> str:
        """Add what `next()` returned or raised. Returns the arguments of its span."""
        _, epoch, _, now, _, _, _, seq, error = record
        if error is not None:
            name = type(error).__name__ + ("" if seq is None else f" at batch {seq}")
            self._mark(row, name, now - 1, "t", about=shorten(error, 400))
        if seq is None:
            return _about(epoch)
        which, (sent, ready) = _about(epoch, seq), batches
        self._steps[row] = now, which
        since = sent.pop(seq, now)
        if seq in ready:  # not in it: an error of this process
            ready.discard(seq)
            self._add_asynchronous("batch", since, now, which)
            self._events.append(_READY % (self._pid, now - self.origin, len(ready)))
        return which

    def _add_step(self, step: records.Step, epoch: int, row: int, batches: _Batches) -> None:
        match step:
            case records.ANSWERED, worker, pid, answer:
                self._add_answer(epoch, batches, worker, pid, answer)
            case records.DREW, began, ended, seqs:
                if began != ended:  # equal if tasks were sent again
                    self._add(row, "sampler", began, ended)
                for seq in seqs:
                    batches[0].setdefault(seq, ended)
            case records.DEVICE, began, ended:
                self._add(row, "device", began, ended)
            case records.WAITED, began, ended, cause, _, _:
                self._add(row, f"wait: {cause.replace('_', ' ')}", began, ended)
            case records.LOADED, began, ended, seq, fetched:
                which = _about(epoch, seq)
                fetched = max(began, fetched)  # an earlier batch's time, if loading failed
                self._add(row, "fetch", began, fetched, which)
                self._add(row, "collate", fetched, ended, which)
            case records.REPLACED, now, worker, pid, report:
                self._mark(self._worker(worker, pid), f"worker {worker} was replaced", now, about=report)

    def _add_answer(
        self, epoch: int, batches: _Batches, worker: WorkerCounters, pid: int, answer: Answer
    ) -> None:
        sent, ready = batches
        seq, row, which = answer.seq, self._worker(worker.id, pid), _about(epoch, answer.seq)
        started, finished = answer.started, answer.finished
        if answer.kind in _OTHERS:
            self._add(row, _OTHERS[answer.kind], started, finished)
            sent.pop(seq, None)
            return
        # Without times, everything counts as fetching. Times of an earlier batch give spans of length 0.
        fetched = min(max(answer.fetched, started), finished) if answer.collated else finished
        collated = min(max(answer.collated, fetched), finished)
        self._add(row, "fetch", started, fetched, which)
        self._add(row, "collate", fetched, collated, which)
        self._add(row, "pack", collated, finished, which)
        if seq in sent:
            ready.add(seq)


def _end_of_last(steps: Sequence[records.Step], began: int) -> int:
    """When the last step of a call ended that began then. The call itself did not end before."""
    ends: list[int] = [until for what, _, until, *_ in steps if what in _SPANS]
    return max([began, *ends])


def _about(epoch: int, batch: int | None = None) -> str:
    """The `args` of a span, as JSON."""
    return f',"args":{{"epoch":{epoch}}}' if batch is None else f',"args":{{"epoch":{epoch},"batch":{batch}}}'
