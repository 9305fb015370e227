"""A trace of a loader: the records of its calls (see `statistics.records`), written to a file as events.

Runs in the consumer, wherever records are folded: on the threads that call `next()`, and on any other that
asks for statistics. It may end on any thread, too.

The events are those of the Trace Event Format, JSON array format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). A time is written as
nanoseconds with the exponent of a microsecond, "12345e-3", which costs a third of a decimal fraction. Each
worker has a row, and so has each thread that iterates. Spans of one row never overlap in part: viewers drop
what does. So a span is written when it has ended. Batches under way and copies may overlap, so they are
asynchronous events, which viewers lay out themselves.

A file that is cut off anywhere is still one that viewers open: they take an array without an end. So each
write has whole events only, and goes to the system at once. A consumer that is killed loses what was not
written yet, and nothing else.
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
from fastq_loader.ipc.messages import ENDED, LEFT_OUT, PASSED, SKIPPED, Answer
from fastq_loader.statistics import records
from fastq_loader.statistics.counters import Counters
from fastq_loader.statistics.workers import WorkerCounters
from fastq_loader.system import process_id

try:
    import fcntl
except ImportError:  # another system's
    fcntl = None  # type: ignore[assignment]

#: Nanoseconds between two writes, while there are calls of `next()`. A consumer that hangs or is killed loses
#: what came after the last one.
_EVERY = 10_000_000
#: Workers on other machines may have the process ids of some here: their rows have numbers above those of
#: all threads, which is Linux's PID_MAX_LIMIT.
_FAR = 1 << 22
#: What an answer without a batch was.
_OTHERS = {ENDED: "end of the stream", SKIPPED: "skip", PASSED: "pass over", LEFT_OUT: "leave out"}
#: The spans of calls, and the marks of an epoch that is over.
_CALLS = {records.ITER: "iter", records.NEXT: "next", records.CUT: "next", records.END: "next"}
_OVER = {records.END: "ends", records.DROP: "is broken off"}

#: Of an epoch: batches that were given out and not handed out, and when; those of them that have come.
_Batches = tuple[dict[int, int], set[int]]


@contextmanager
def traced(path: str | PathLike[str], counters: Counters) -> Iterator[None]:
    """Write down what a loader does for as long as the context lasts; see `DataLoader.trace`.

    Args:
        path: of the file.
        counters: the loader's.

    Raises, where the context begins or ends:
        OSError: the file cannot be written. One that occurs in between ends the trace, and nothing else.
        ValueError: another trace is being written to it.
        RuntimeError: the loader is being traced.
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
        with suppress(OSError):  # the other says more
            recorder.end()
        raise
    recorder.end()


def _opened(path: str | PathLike[str]) -> int:
    """A file to write to, emptied; locked, because two traces in one file could not be read."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    try:
        if fcntl is not None:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
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
    """Makes events of records, and writes them to a file. A forked child that has inherited it writes none.

    Args:
        path: of the file.
        counters: the loader's.

    Attributes:
        origin: where times count from, in nanoseconds of the monotonic clock.
    """

    def __init__(self, path: str | PathLike[str], counters: Counters) -> None:
        self.origin = self._written = time.monotonic_ns()
        self._fd = _opened(path)
        self._counters = counters
        self._failure: OSError | None = None
        self._pid = pid = process_id.current()
        # Reentrant, because the handler of a signal may end the trace in the middle of a write.
        self._lock = threading.RLock()
        self._over = False
        self._epochs: dict[int, _Batches | None] = {}  # None: its end is in the trace
        self._steps: dict[int, tuple[int, str]] = {}  # thread → when a call gave it a batch, and which one
        self._far: dict[tuple[int, int, str], int] = {}  # process here, process there, and machine → row
        self._named: set[int] = set()  # rows
        self._asynchronous = 0  # how many of these spans there were
        self._span = f'{{"ph":"X","pid":{pid},"tid":%d,"name":"%s","ts":%de-3,"dur":%de-3%s}}'
        self._ready = f'{{"ph":"C","pid":{pid},"name":"ready","ts":%de-3,"args":{{"batches":%d}}}}'
        self._lines: list[str] = []
        about = {"name": f"DataLoader (pid {pid})", "origin_ns": self.origin}
        self._event("M", 0, "process_name", about)
        self._before = b"[\n"  # before the next event in the file

    # ---- the file -------------------------------------------------------------------------------

    def _write(self, now: int, after: bytes = b"") -> None:
        """Write the events so far, and what is to come after them."""
        if self._pid != process_id.current():  # a forked child: the lock may be another thread's
            self._counters.follow()
            self._lines.clear()
            return
        with self._lock:
            if self._over:  # another thread was folding when it ended
                return
            lines, self._lines, self._written = self._lines, [], now
            data = self._before + ",\n".join(lines).encode("ascii") if lines else b""
            data, self._before = data + after, b",\n"
            try:
                while data and self._failure is None:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:  # the trace ends, and `end` raises
                self._failure = error
                self._counters.follow()

    def end(self) -> None:
        """Write down what is left, and close the file.

        Raises:
            OSError: it could not be written, now or before.
        """
        if self._failure is None:  # else another one may have begun
            self._counters.follow()
        self._write(time.monotonic_ns(), b"\n]\n")
        self._over = True
        if fcntl is not None and self._pid == process_id.current():
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # workers that were forked may have it open for a while
        os.close(self._fd)
        if self._failure is not None:
            raise self._failure

    # ---- rows, spans and marks ------------------------------------------------------------------

    def _event(self, ph: str, row: int, name: str, about: dict[str, object], **more: object) -> None:
        event = {"ph": ph, "pid": self._pid, "tid": row, "name": name, "args": about}
        self._lines.append(json.dumps(event | more))

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
        """The row of the worker that a process is, or stands for. The first has the number of the process,
        which no other on this machine has."""
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
        if self.origin <= began <= ended:  # else the trace began in the middle of it
            self._lines.append(self._span % (row, name, began - self.origin, ended - began, about))

    def _add_asynchronous(self, name: str, began: int, ended: int, about: str) -> None:
        """A span that may overlap others of its name."""
        if began >= self.origin:
            self._asynchronous += 1
            which = f'"pid":{self._pid},"cat":"{name}","id":{self._asynchronous},"name":"{name}"'
            for phase, when, more in (("b", began, about), ("e", ended, "")):
                self._lines.append(f'{{"ph":"{phase}",{which},"ts":{when - self.origin}e-3{more}}}')

    def _mark(self, row: int, name: str, now: int, scope: str = "p", **about: object) -> None:
        if now >= self.origin:
            self._event("i", row, name, about, s=scope, ts=(now - self.origin) / 1000)

    # ---- records --------------------------------------------------------------------------------

    def fold(self, record: records.Record) -> None:
        """Add the events of a record."""
        kind, epoch, began, ended, thread, steps = record[:6]
        if kind == records.COPY:
            self._add_asynchronous("copy to the device", began, ended, f',"args":{{"bytes":{record[6]}}}')
            return
        row = self._consumer(thread)
        if kind == records.CLOSE:
            self._add(row, "end of the workers", began, ended)
            return
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
        which = _about(epoch)
        if kind == records.NEXT:
            _, seq, error = record[6:]
            if error is not None:
                name = type(error).__name__ + ("" if seq is None else f" at batch {seq}")
                self._mark(row, name, ended - 1, "t", about=shorten(error, 400))
            if seq is not None:
                which = _about(epoch, seq)
                self._steps[row] = ended, which
                self._hand_out(seq, which, ended, *batches)
        elif kind in _OVER and self._epochs[epoch] is not None:
            self._epochs[epoch] = None
            self._mark(row, f"epoch {epoch} {_OVER[kind]}", ended)
            self._lines.append(self._ready % (ended - self.origin, 0))
        if kind == records.CUT:  # it has ended somewhere after its last step
            ended = max([began, *(step[2] for step in steps if step[0] in records.SPANS)])
        if kind in _CALLS:
            self._add(row, _CALLS[kind], began, ended, which)
            if ended - self._written >= _EVERY:
                self._write(ended)

    def _hand_out(self, seq: int, which: str, now: int, sent: dict[int, int], ready: set[int]) -> None:
        since = sent.pop(seq, now)
        if seq in ready:  # else it is an error of this process
            ready.discard(seq)
            self._add_asynchronous("batch", since, now, which)
            self._lines.append(self._ready % (now - self.origin, len(ready)))

    def _add_step(self, step: records.Step, epoch: int, row: int, batches: _Batches) -> None:
        what, began, ended = step[:3]
        if what == records.ANSWERED:
            self._add_answer(epoch, batches, *step[1:])
        elif what == records.DREW:
            if began != ended:  # else tasks were sent again
                self._add(row, "sampler", began, ended)
            for seq in step[3]:
                batches[0].setdefault(seq, ended)
        elif what == records.DEVICE:
            self._add(row, "device", began, ended)
        elif what == records.WAITED:
            self._add(row, f"wait: {step[3].replace('_', ' ')}", began, ended)
        elif what == records.LOADED:
            which = _about(epoch, step[3])
            fetched = max(began, step[4])  # that of an earlier batch, if this one failed before
            self._add(row, "fetch", began, fetched, which)
            self._add(row, "collate", fetched, ended, which)
        elif what == records.REPLACED:
            _, now, worker, pid, report = step
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
        # What is not known counts as fetching; what is of an earlier batch takes no time.
        fetched = min(max(answer.fetched, started), finished) if answer.collated else finished
        collated = min(max(answer.collated, fetched), finished)
        self._add(row, "fetch", started, fetched, which)
        self._add(row, "collate", fetched, collated, which)
        self._add(row, "pack", collated, finished, which)
        if seq in sent:
            ready.add(seq)


def _about(epoch: int, batch: int | None = None) -> str:
    """The arguments of a span."""
    return f',"args":{{"epoch":{epoch}}}' if batch is None else f',"args":{{"epoch":{epoch},"batch":{batch}}}'
