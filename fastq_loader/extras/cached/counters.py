"""The counters of a cache, shared by all processes that call it.

Runs in every process that calls a cached function. Each process has its own row of a memfd, which it locks; a
later process reuses the row of one that has ended.
"""

from __future__ import annotations

import mmap
import os

from fastq_loader.api import calls, locks

NAMES = "hits", "misses", "stored", "full", "busy", "random", "refused", "damaged"
_INDEX = {name: at for at, name in enumerate(NAMES)}
_HINTED = len(NAMES)  # the word of a row that says whether its process has warned
_ROW_WORDS, _ROWS = 16, 2048
#: Bytes of the memory.
NBYTES = _ROWS * _ROW_WORDS * 8


class Counters:
    """Counts of all processes.

    Args:
        fd: descriptor of the shared memory, closed with this object; -1: counts of this process only.
    """

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self._held = -1
        memory = bytearray(_ROW_WORDS * 8) if fd < 0 else mmap.mmap(fd, NBYTES)
        self._words = memoryview(memory).cast("Q")
        self._row = self._words

    def enter(self) -> None:
        """Take a row for this process; a forked child has its parent's. Called by one thread at a time."""
        if self.fd >= 0:
            before, self._held = self._held, locks.open_anew(self.fd)
            if before >= 0:
                os.close(before)
            rows = (row for row in range(_ROWS) if locks.try_lock(self._held, row, 1))
            row = next(rows, _ROWS - 1) * _ROW_WORDS
            self._row = self._words[row : row + _ROW_WORDS]

    def add(self, name: str) -> None:
        self._row[_INDEX[name]] += 1

    def is_first_hint(self) -> bool:
        """Whether no process has warned yet."""
        if any(self._words[_HINTED::_ROW_WORDS]):
            return False
        self._row[_HINTED] = 1
        return True

    def sums(self) -> dict[str, int]:
        return {name: sum(self._words[at::_ROW_WORDS]) for at, name in enumerate(NAMES)}

    def __del__(self) -> None:
        for fd in (self.fd, self._held):
            if fd >= 0:
                os.close(fd)


def create() -> int:
    """Make memory for counts. Returns a descriptor."""
    fd = calls.memfd_create("fastq_loader.cache counters")
    os.ftruncate(fd, NBYTES)
    return fd
