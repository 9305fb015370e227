"""The file of a trace.

Runs in the consumer. A file that is cut off anywhere is still one that viewers open: they take an array
without an end. So each write has whole events only, and goes to the system at once. Who is killed loses what
was not written yet, and nothing else.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from contextlib import suppress

from fastq_loader.system import process_id

try:
    import fcntl
except ImportError:  # another system's
    fcntl = None  # type: ignore[assignment]


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
