"""A trace of a loader: events of what happens in it, written to a file as it goes.

Runs in the consumer. It is told of what happens on the threads that call `next()`, and of the end of an epoch
on any thread. It may end on any thread, too.

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
from fastq_loader.statistics.counters import Counters
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
    if counters.observer is not None:
        raise RuntimeError(
            f"this loader is being traced already, so nothing can be written to {os.fspath(path)!r}: end "
            "that trace first, or trace another loader"
        )
    recorder = Recorder(path, counters)
    counters.observe(recorder)
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


class _TracedEpoch:
    """An epoch that is under way.

    Attributes:
        thread: that called last.
        entered: when it did; 0: no call is under way.
        call: which one, "iter" or "next".
        sent: batches that were given out and not handed out, and when.
        ready: those of them that have come.
    """

    def __init__(self, thread: int, now: int = 0) -> None:
        self.thread = thread
        self.entered = now
        self.call = "iter"
        self.sent: dict[int, int] = {}
        self.ready: set[int] = set()


class Recorder:
    """An `Observer` (see `statistics.epoch`) that makes events of what it is told, and writes them to a file.
    A forked child that has inherited it writes nothing.

    Args:
        path: of the file.
        counters: the loader's.

    Attributes:
        origin: where times count from, in nanoseconds of the monotonic clock.
        thread: gives the id of the calling thread.
    """

    def __init__(self, path: str | PathLike[str], counters: Counters) -> None:
        self.thread = threading.get_native_id
        self.origin = self._written = time.monotonic_ns()
        self._fd = _opened(path)
        self._counters = counters
        self._failure: OSError | None = None
        self._pid = pid = process_id.current()
        # Reentrant, because the handler of a signal may end the trace in the middle of a write.
        self._lock = threading.RLock()
        self._epochs: dict[int, _TracedEpoch] = {}
        self._steps: dict[int, tuple[int, str]] = {}  # thread → when a call gave it a batch, and which one
        self._far: dict[tuple[int, int, str], int] = {}  # process here, process there, and machine → row
        self._named: set[int] = set()  # rows
        self._asynchronous = 0  # how many of these spans there were
        self._span = f'{{"ph":"X","pid":{pid},"tid":%d,"name":"%s","ts":%de-3,"dur":%de-3%s}}'
        self._ready = f'{{"ph":"C","pid":{pid},"name":"ready","ts":%de-3,"args":{{"batches":%d}}}}'
        self._lines: list[str] = []
        about = {"name": f"DataLoader (pid {pid})", "origin_ns": self.origin}
        self._tell("M", 0, "process_name", about)
        self._before = b"[\n"  # before the next event in the file

    # ---- the file -------------------------------------------------------------------------------

    def _write(self, now: int, after: bytes = b"") -> None:
        """Write the events so far, and what is to come after them."""
        if self._pid != process_id.current():  # a forked child: the lock may be another thread's
            self._counters.observe(None)
            self._lines.clear()
            return
        with self._lock:
            lines, self._lines, self._written = self._lines, [], now
            data = self._before + ",\n".join(lines).encode("ascii") if lines else b""
            data, self._before = data + after, b",\n"
            try:
                while data and self._failure is None:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:  # the trace ends, and `end` raises
                self._failure = error
                self._counters.observe(None)

    def end(self) -> None:
        """Write down what is left, and close the file.

        Raises:
            OSError: it could not be written, now or before.
        """
        if self._counters.observer is self:
            self._counters.observe(None)
        self._write(time.monotonic_ns(), b"\n]\n")
        if fcntl is not None and self._pid == process_id.current():
            with suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_UN)  # workers that were forked may have it open for a while
        os.close(self._fd)
        if self._failure is not None:
            raise self._failure

    # ---- rows, spans and marks ------------------------------------------------------------------

    def _tell(self, ph: str, row: int, name: str, about: dict[str, object], **more: object) -> None:
        event = {"ph": ph, "pid": self._pid, "tid": row, "name": name, "args": about}
        self._lines.append(json.dumps(event | more))

    def _name_row(self, row: int, name: str, order: int) -> None:
        self._named.add(row)
        self._tell("M", row, "thread_name", {"name": name})
        self._tell("M", row, "thread_sort_index", {"sort_index": order})

    def _consumer(self, thread: int = 0) -> int:
        thread = thread or self.thread()
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
        self._tell("i", row, name, about, s=scope, ts=(now - self.origin) / 1000)

    # ---- calls ----------------------------------------------------------------------------------

    def _epoch(self, epoch: int) -> _TracedEpoch:
        """It may have begun before the trace did."""
        if epoch not in self._epochs:
            self._epochs[epoch] = _TracedEpoch(self._consumer())
        return self._epochs[epoch]

    def began(self, epoch: int, now: int) -> None:
        """`iter()` was called."""
        thread = self._consumer()
        self._end_step(thread, now)
        self._epochs[epoch] = _TracedEpoch(thread, now)
        self._mark(thread, f"epoch {epoch} begins", now)

    def entered(self, epoch: int, now: int, thread: int = 0) -> None:
        """`next()` was called, by this thread if not by the one that calls now."""
        at = self._epoch(epoch)
        at.thread, at.entered, at.call = self._consumer(thread), now, "next"
        self._end_step(at.thread, now)

    def _end_step(self, thread: int, now: int) -> None:
        if thread in self._steps:
            began, which = self._steps.pop(thread)
            self._add(thread, "step", began, now, which)

    def left(self, epoch: int, seq: int | None, now: int) -> None:
        """The call is about to give a batch, or to raise."""
        at, which = self._epoch(epoch), f',"args":{{"epoch":{epoch}}}'
        if seq is not None:
            which = f',"args":{{"epoch":{epoch},"batch":{seq}}}'
            self._steps[at.thread] = now, which
            sent = at.sent.pop(seq, now)
            if seq in at.ready:  # else it is an error of this process
                at.ready.discard(seq)
                self._add_asynchronous("batch", sent, now, which)
                self._lines.append(self._ready % (now - self.origin, len(at.ready)))
        if at.entered:
            self._add(at.thread, at.call, at.entered, now, which)
        if now - self._written >= _EVERY:
            self._write(now)

    def raised(self, epoch: int, seq: int | None, error: BaseException, now: int) -> None:
        """The call is about to raise."""
        name = type(error).__name__ + ("" if seq is None else f" at batch {seq}")
        self._mark(self._epoch(epoch).thread, name, now - 1, "t", about=shorten(error, 400))

    def ended(self, epoch: int, now: int, how: str = "ends") -> None:
        """There is no further batch."""
        if (at := self._epochs.pop(epoch, None)) is not None:
            self._mark(at.thread, f"epoch {epoch} {how}", now)
            self._lines.append(self._ready % (now - self.origin, 0))

    def dropped(self, epoch: int, now: int) -> None:
        """What was not handed out never will be."""
        self.ended(epoch, now, "is broken off")

    def closed(self, began: int, now: int) -> None:
        """The workers were ended."""
        self._add(self._consumer(), "end of the workers", began, now)

    # ---- what happens in a call -------------------------------------------------------------------

    def drew(self, epoch: int, began: int, ended: int) -> None:
        """The sampler was asked for an index."""
        self._add(self._epoch(epoch).thread, "sampler", began, ended)

    def waited(self, epoch: int, cause: str, began: int, ended: int) -> None:
        """`next()` waited for workers."""
        self._add(self._epoch(epoch).thread, f"wait: {cause.replace('_', ' ')}", began, ended)

    def used_device(self, epoch: int, began: int, ended: int) -> None:
        """Something was done for the way to the device."""
        self._add(self._epoch(epoch).thread, "device", began, ended)

    def loaded(self, epoch: int, seq: int, began: int, fetched: int, ended: int) -> None:
        """A batch was loaded on the consumer's thread."""
        thread, which = self._epoch(epoch).thread, f',"args":{{"epoch":{epoch},"batch":{seq}}}'
        fetched = max(began, fetched)  # that of an earlier batch, if this one failed before
        self._add(thread, "fetch", began, fetched, which)
        self._add(thread, "collate", fetched, ended, which)

    def copied(self, nbytes: int, began: int, ended: int) -> None:
        """A copy to the device was seen to have run."""
        self._add_asynchronous("copy to the device", began, ended, f',"args":{{"bytes":{nbytes}}}')

    # ---- workers --------------------------------------------------------------------------------

    def sent(self, epoch: int, seq: int, now: int) -> None:
        """The task of a batch was given out, for the first time or again."""
        self._epoch(epoch).sent.setdefault(seq, now)

    def replaced(self, epoch: int, worker: int, pid: int, report: str, now: int) -> None:
        """Another process does the work of a worker from now on."""
        self._mark(self._worker(worker, pid), f"worker {worker} was replaced", now, about=report)

    def answered(self, epoch: int, worker: int, pid: int, answer: Answer) -> None:
        """An answer of a worker's process has come."""
        at, seq, row = self._epoch(epoch), answer.seq, self._worker(worker, pid)
        started, finished = answer.started, answer.finished
        if answer.kind in _OTHERS:
            self._add(row, _OTHERS[answer.kind], started, finished)
            at.sent.pop(seq, None)
            return
        # What is not known counts as fetching; what is of an earlier batch takes no time.
        fetched = min(max(answer.fetched, started), finished) if answer.collated else finished
        collated = min(max(answer.collated, fetched), finished)
        which = f',"args":{{"epoch":{epoch},"batch":{seq}}}'
        self._add(row, "fetch", started, fetched, which)
        self._add(row, "collate", fetched, collated, which)
        self._add(row, "pack", collated, finished, which)
        if seq in at.sent:
            at.ready.add(seq)
