"""Which hits are computed again and compared.

Runs in every process that calls a cached function. What a value depends on cannot be found by looking at the
function; it can be found by computing the value again. Draws from no generator.

- The first `FIRST` hits of the cache, over all processes; of a method that is cached in its class, for each
  of the first objects.
- The first hit of each worker's number on the values of each writer: once in a program, not again in new
  workers, and not if both were found to agree with the first worker. A writer is a program and the number of
  its worker; of a folder, all writers of one earlier program are one. Where computing takes more than `SLOW`
  seconds, it waits for the budget.
- Later a part of the hits, chosen by a hash, for which the checks of all processes take at most `BUDGET` of
  the time. Time that no check has used is gone with the next one, so none of it is left for a short epoch
  after a long pause. New workers go on with the budget of those before them.
"""

from __future__ import annotations

import math
import time
import zlib

from torch.utils.data import get_worker_info

from fastq_loader.extras.cached.counters import CacheCounters
from fastq_loader.system import process_id

FIRST, SLOW, BUDGET = 16, 0.5, 0.02
#: At most so many hits are between two that are checked if the budget has the time for them.
_MOST = 16
#: Bits of a writer for the number of the worker, which is 0 in the program itself.
_WORKER_BITS = 16
_NANOSECONDS = 10**9


class Checks:
    """The checks of one process.

    Args:
        program: the number of the program, which it drew when it made the cache.
        counters: of the cache.
        joins_earlier: whether the writers of another program count as one.
    """

    def __init__(self, program: int, counters: CacheCounters, joins_earlier: bool) -> None:
        worker = get_worker_info()
        number = 0 if worker is None else worker.id % ((1 << _WORKER_BITS) - 1) + 1
        self.writer, self._first_worker = program << _WORKER_BITS | number, program << _WORKER_BITS | 1
        self._counters, self._joins_earlier = counters, joins_earlier
        # Writers whose values this worker's number has checked, once the first hits of the cache have been.
        self._known: set[int] = set()
        self._firsts = 0  # of the first hits, how many some process is known to have checked
        # Hits until one may be checked, and how many were; new workers choose others on the same keys.
        self._left, self._picked = hash(b"%d" % process_id.pid) % _MOST + 1, process_id.pid
        self.failed_reads = 0  # in turn, while computing again
        counters.since = counters.since or time.monotonic_ns()

    def due(self, key: bytes, writer: int, seconds: float) -> float | None:
        """Whether a hit is to be checked: None if not; else the seconds that the budget has paid for it.

        Args:
            key: of the call.
            writer: who stored the value.
            seconds: how long computing it took.
        """
        if writer not in self._known:
            is_first, agrees = self._first() > 0, self._agrees(writer)
            if is_first or not agrees:
                return math.inf if is_first or seconds <= SLOW else self._pay(seconds)
            self._known.add(writer)
        self._left -= 1
        if self._left > 0:
            return None
        self._picked += 1
        self._left = hash(b"%b %d" % (key, self._picked)) % _MOST + 1
        return self._pay(seconds)

    def done(self, writer: int, paid: float, seconds: float) -> None:
        """Note a check that was made, and how long it took."""
        counters = self._counters
        if paid < math.inf:  # the record's time may be that of a cold disk
            counters.since += int((seconds - paid) / BUDGET * _NANOSECONDS)
        if first := self._first():
            counters.note(first)
        if writer not in self._known:
            counters.note(self._pair(self.writer, writer))
            if counters.has(self._pair(self.writer, self._first_worker)):
                counters.note(self._pair(self._first_worker, writer))

    def _pay(self, seconds: float) -> float | None:
        now = time.monotonic_ns()
        if now - self._counters.since < seconds / BUDGET * _NANOSECONDS:
            return None
        self._counters.since = now
        return seconds

    def _first(self) -> int:
        """A hash for the next one of the first hits; 0 if all are checked."""
        while self._firsts < FIRST:
            first = _hashed(f"{self._first_worker} first {self._firsts}")
            if not self._counters.has(first):
                return first
            self._firsts += 1
        return 0

    def _agrees(self, writer: int) -> bool:
        """Whether this worker has checked the writer's values, or both agree with the first worker."""
        has, first = self._counters.has, self._first_worker
        return has(self._pair(self.writer, writer)) or (
            has(self._pair(self.writer, first)) and has(self._pair(first, writer))
        )

    def _pair(self, reader: int, writer: int) -> int:
        program = writer >> _WORKER_BITS
        if self._joins_earlier and program != self.writer >> _WORKER_BITS:
            writer = program << _WORKER_BITS
        return _hashed(f"{reader} {writer}")


def _hashed(text: str) -> int:
    """As the counters note it: not 0."""
    return zlib.crc32(text.encode()) or 1
