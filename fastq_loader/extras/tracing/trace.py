"""A trace of a loader: the records of its calls (see `statistics.records`), written to a file as events.

Runs in the consumer, on the threads that call `next()`. A trace may end on any thread.

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
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from os import PathLike

from fastq_loader.errors import shorten
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.records import CLOSE, CUT, END, ITER, NEXT, PACKED, Record
from fastq_loader.system import locks, process_id

#: Nanoseconds between two writes, as long as `next()` is called. A consumer that hangs or is killed loses the
#: events after the last write.
_EVERY = 10_000_000
#: First row number for workers on other machines, whose process ids may also exist here: Linux's
#: PID_MAX_LIMIT, above the ids of all threads.
_FAR = 1 << 22

#: A span as it is written, after another event. Others are rare, and `json` writes them.
_SPAN = ',\n{"ph":"X","pid":%d,"tid":%d,"name":"%s","ts":%de-3,"dur":%de-3%s}'


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
    if counters.trace is not None:
        raise RuntimeError(
            f"this loader is being traced already, so nothing can be written to {os.fspath(path)!r}: end "
            "that trace first, or trace another loader"
        )
    recorder = counters.trace = Recorder(path, counters)
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
        locks.lock_file(fd)
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
        self._closed = False
        self._over: set[int] = set()  # epochs whose end is in the trace
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
            self._counters.trace = None
            self._events.clear()
            return
        with self._lock:
            if self._closed:  # another thread was recording when the trace ended
                return
            events, self._events, self._written = self._events, [], now
            data = "".join(events).encode("ascii") + after
            try:
                while data and self._failure is None:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:  # the trace ends, and `end` raises
                self._failure = error
                self._counters.trace = None

    def end(self) -> None:
        """Write the remaining events, and close the file.

        Raises:
            OSError: the file could not be written, now or before.
        """
        if self._failure is None:  # after a failure, another trace may have begun
            self._counters.trace = None
        self._write(time.monotonic_ns(), b"\n]\n")
        self._closed = True
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

    def _consumer(self) -> int:
        thread = threading.get_native_id()
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

    # ---- what loaders call ------------------------------------------------------------------------

    def add(self, packed: bytes, error: BaseException | type | None) -> None:
        """Add a call, on the thread that made it."""
        record = Record._make(PACKED.unpack(packed))
        kind, epoch, asked, returned, seq = *record[:4], record.seq
        row = self._consumer()
        if row in self._steps:
            since, which = self._steps.pop(row)
            self._add(row, "step", since, asked, which)
        if kind == CLOSE:
            self._add(row, "end of the workers", asked, returned)
            return
        if kind == ITER:
            self._mark(row, f"epoch {epoch} begins", asked)
        which = _about(epoch, seq)
        self._add_parts(record, row, which)
        if kind == NEXT and seq >= 0:
            self._steps[row] = returned, which
            if record.pid:
                self._add_loading(self._worker(record.worker, record.pid), record, which)
                self._add_asynchronous("batch", record.sent, returned, which)
        if error is not None:
            name = type(error).__name__ + ("" if seq < 0 else f" at batch {seq}")
            self._mark(row, name, returned - 1, "t", about=shorten(error, 400))
        if kind == END:
            self._over.add(epoch)
            self._mark(row, f"epoch {epoch} ends", returned)
        if kind == CUT:  # it ended at some time after its last part
            ended = max(asked, record.wait_until, record.drew_until, record.device_until)
            self._add(row, "next", asked, ended, which)
        else:
            self._add(row, "iter" if kind == ITER else "next", asked, returned, which)
        if returned - self._written >= _EVERY:
            self._write(returned)

    def add_drop(self, epoch: int, now: int) -> None:
        """The rest of an epoch is dropped, if it is not over."""
        if epoch not in self._over:
            self._over.add(epoch)
            self._mark(self._consumer(), f"epoch {epoch} is broken off", now)

    def add_replaced(self, worker: int, pid: int, report: str) -> None:
        """A new process has taken over a worker; `report` says how the old one ended."""
        row = self._worker(worker, pid)
        self._mark(row, f"worker {worker} was replaced", time.monotonic_ns(), about=report)

    def add_copy(self, nbytes: int, began: int, ended: int) -> None:
        """A copy to the device has run."""
        self._add_asynchronous("copy to the device", began, ended, f',"args":{{"bytes":{nbytes}}}')

    def _add_parts(self, record: Record, row: int, which: str) -> None:
        """Add the parts of a call."""
        waited = record.wait_from, record.wait_until
        if record.started and not record.pid:  # loaded here
            self._add_loading(row, record, which)
        elif record.wait_from:
            waits = {"workers": record.workers, "head of line": record.head, "memory": record.memory}
            self._add(row, f"wait: {max(waits, key=lambda cause: waits[cause])}", *waited)
        for name, took, until in (
            ("sampler", record.drew, record.drew_until),
            ("device", record.device, record.device_until),
        ):
            if took:  # in a row, where several parts have a wait between them
                others = record.asked, *waited, record.drew_until, record.device_until
                self._add(row, name, max(until - took, *(at for at in others if at < until)), until)

    def _add_loading(self, row: int, record: Record, which: str) -> None:
        # Without times, everything counts as fetching. Times of an earlier batch give spans of length 0.
        started, finished = record.started, record.finished
        fetched = min(max(record.fetched, started), finished) if record.collated else finished
        collated = min(max(record.collated, fetched), finished)
        self._add(row, "fetch", started, fetched, which)
        self._add(row, "collate", fetched, collated, which)
        if record.pid:
            self._add(row, "pack", collated, finished, which)


def _about(epoch: int, batch: int = -1) -> str:
    """The `args` of a span, as JSON."""
    return f',"args":{{"epoch":{epoch}}}' if batch < 0 else f',"args":{{"epoch":{epoch},"batch":{batch}}}'
