"""Which hits are computed again and compared.

Runs in every process that calls a cached function. What a value depends on cannot be found by looking at the
function; it can be found by computing the value again. Draws from no generator.

- In each process, the first hit on the values of each writer: once for each pair of a worker's number and a
  writer, not again in new workers. A writer is a program and the number of its worker; of a folder, all
  writers of one earlier program are one. Where computing takes more than `SLOW` seconds, it waits for the
  budget.
- The first `FIRST` hits of the cache, over all processes.
- Later a part of the hits, chosen by a hash, for which the checks of all processes take at most `BUDGET` of
  the time since the program began to use the cache. New workers go on with the budget of those before them.
"""

from __future__ import annotations

import time
import zlib

from torch.utils.data import get_worker_info

from fastq_loader.extras.cached.counters import CacheCounters

FIRST, SLOW, BUDGET = 16, 0.5, 0.02
#: One of so many hits is checked while the budget lasts, so that which ones does not follow the clock.
_ONE_OF, _MIXES = 8, 0x9E3779B1
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
        self.writer = program << _WORKER_BITS | number
        self._counters, self._joins_earlier = counters, joins_earlier
        # Writers whose values this worker's number has checked, once the first hits of the cache have been.
        self._known: set[int] = set()
        self._hits = 0
        self.failed_reads = 0  # in turn, while computing again
        counters.began = counters.began or time.monotonic_ns()

    def due(self, key: bytes, writer: int, seconds: float) -> int | None:
        """Whether a hit is to be checked: None if not; else a hash of worker number and writer if it is their
        first one, or 0.

        Args:
            key: of the call.
            writer: who stored the value.
            seconds: how long computing it took.
        """
        self._hits += 1
        if writer not in self._known:
            pair = self._pair(writer)
            is_first = self._counters.first < FIRST
            if self._counters.has_checked(pair):
                if not is_first:
                    self._known.add(writer)
            elif seconds <= SLOW or self._is_in_budget(seconds):
                return pair
            if is_first:
                return 0
        if (hash(key) ^ self._hits * _MIXES) >> 13 & _ONE_OF - 1:
            return None
        return 0 if self._is_in_budget(seconds) else None

    def done(self, check: int, seconds: float) -> None:
        """Note a check that was made, and how long it took."""
        counters = self._counters
        counters.spent += int(seconds * _NANOSECONDS)
        if check:
            counters.note_checked(check)
        if counters.first < FIRST:
            counters.first += 1

    def _is_in_budget(self, seconds: float) -> bool:
        passed = time.monotonic_ns() - self._counters.began
        return bool(self._counters.spent + seconds * _NANOSECONDS <= BUDGET * passed)

    def _pair(self, writer: int) -> int:
        other = writer >> _WORKER_BITS
        if self._joins_earlier and other != self.writer >> _WORKER_BITS:
            writer = other << _WORKER_BITS
        return zlib.crc32(f"{self.writer} {writer}".encode()) << 16 | 1
