"""A trace of a loader, from its beginning to its end.

Runs in the consumer. It is told of what happens on the threads that call `next()`, and of the end of an epoch
on any thread. It may end on any thread, too.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import AbstractContextManager, suppress
from os import PathLike

from fastq_loader.statistics.counters import Counters
from fastq_loader.system import process_id
from fastq_loader.tracing.events import Events
from fastq_loader.tracing.writer import TraceFile

#: Nanoseconds between two writes, while there are calls of `next()`. A consumer that hangs or is killed loses
#: what came after the last one.
_EVERY = 10_000_000


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
