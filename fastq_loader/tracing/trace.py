"""A trace of a loader, from its beginning to its end, and its file.

Runs in the consumer. It is told of what happens on the threads that call `next()`, and of the end of an epoch
on any thread. It may end on any thread, too.

A file that is cut off anywhere is still one that viewers open: they take an array without an end. So each
write has whole events only, and goes to the system at once. Who is killed loses what was not written yet, and
nothing else.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from os import PathLike

from fastq_loader.statistics.counters import Counters
from fastq_loader.system import process_id
from fastq_loader.tracing.events import Events

try:
    import fcntl
except ImportError:  # another system's
    fcntl = None  # type: ignore[assignment]

#: Nanoseconds between two writes, while there are calls of `next()`. A consumer that hangs or is killed loses
#: what came after the last one.
_EVERY = 10_000_000


class TraceFile:
    """A file that events are written to. A forked child that has inherited it writes nothing.

    Args:
        path: of the file, which is overwritten.

    Raises:
        OSError: it cannot be opened.
        ValueError: somebody is writing a trace to it.
    """

    def __init__(self, path: str | bytes) -> None:
        self._owner = process_id.current()
        self._before = b"[\n"  # before the next event
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            self._lock(path)
            if stat.S_ISREG(os.fstat(self._fd).st_mode):
                os.ftruncate(self._fd, 0)
        except BaseException:
            os.close(self._fd)
            raise

    def _lock(self, path: str | bytes) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"path={os.fsdecode(path)!r}: another trace is being written to this file; give every "
                "loader, and every rank, a file of its own"
            ) from None
        except OSError:  # not on every file system
            pass

    def write(self, events: Sequence[str]) -> None:
        """Write events, each a JSON object.

        Raises:
            OSError: the file cannot be written any more.
        """
        if events:
            text = ",\n".join(events).encode("ascii")
            before, self._before = self._before, b",\n"
            self._write(before + text)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        while left and self._owner == process_id.current():
            left = left[os.write(self._fd, left) :]

    def close(self) -> None:
        """End the array and close the file; workers that were forked may have it open for a while.

        Raises:
            OSError: what was written did not reach the file.
        """
        try:
            self._write((b"" if self._before[:1] == b"," else b"[") + b"\n]\n")
            if fcntl is not None and self._owner == process_id.current():
                with suppress(OSError):
                    fcntl.flock(self._fd, fcntl.LOCK_UN)
        finally:
            os.close(self._fd)


class Trace(AbstractContextManager[None]):
    """Writes down what a loader does for as long as the context lasts; see `DataLoader.trace`.

    Args:
        path: of the file.
        counters: the loader's.

    Raises, where the context begins or ends:
        OSError: the file cannot be written. One that occurs in between ends the trace, and nothing else.
        ValueError: somebody is writing a trace to it.
        RuntimeError: the loader is being traced.
    """

    def __init__(self, path: str | PathLike[str], counters: Counters) -> None:
        self._path = os.fspath(path)
        self._counters = counters
        self._recorder: _Recorder | None = None

    def __enter__(self) -> None:
        counters = self._counters
        if counters.observer is not None:
            raise RuntimeError(
                f"this loader is being traced already, so nothing can be written to {self._path!r}: end that "
                "trace first, or trace another loader"
            )
        self._recorder = _Recorder(TraceFile(self._path), counters)
        counters.observe(self._recorder)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is None:
            return
        if self._counters.observer is recorder:
            self._counters.observe(None)
        try:
            recorder.end()
        except OSError:
            if kind is None:  # else that says more
                raise


class _Recorder(Events):
    """Makes events and writes them down."""

    def __init__(self, file: TraceFile, counters: Counters) -> None:
        self._file: TraceFile | None = file
        self._counters = counters
        self._failure: OSError | None = None
        self._owner = process_id.current()
        # Reentrant, because the handler of a signal may end the trace in the middle of a write.
        self._lock = threading.RLock()
        self._written = 0
        super().__init__(time.monotonic_ns(), self._owner, threading.get_native_id, counters.far_worker)

    def left(self, epoch: int, seq: int | None, now: int) -> None:
        super().left(epoch, seq, now)
        if now - self._written >= _EVERY:
            self._write(now)

    def _write(self, now: int) -> None:
        if self._owner != process_id.current():  # a forked child: the lock may be another thread's
            self._counters.observe(None)
            self.lines.clear()
            return
        with self._lock:
            lines, self.lines, self._written = self.lines, [], now
            if self._file is None:
                return
            try:
                self._file.write(lines)
            except OSError as error:
                self._failure = error
                self._counters.observe(None)
                file, self._file = self._file, None
                with suppress(OSError):
                    file.close()

    def end(self) -> None:
        """Write down what is left, and close the file.

        Raises:
            OSError: it could not be written, now or before.
        """
        now = time.monotonic_ns()
        self.close(now)
        self._write(now)
        file, self._file = self._file, None
        if file is not None:
            file.close()
        if self._failure is not None:
            raise self._failure
