"""The counters of a cache, and what its processes know of its hits: the first bytes of its memory.

Runs in every process that calls a cached function. Each process adds to its own row. Two processes whose ids
are equal in their last bits share one, and may lose a count when both add at once.

    counts    rows of counts, one row for a process
    words     about all processes
    pairs     a table of hashes: which worker numbers have checked a hit on the values of which writer, and
              which of the first hits were checked
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, fields

from fastq_loader.system import process_id

_ROW_WORDS, _ROWS = 16, 2048
#: Words of the table of pairs: with the two before it, whole pages.
_PAIRS = (1 << 16) - 2


@dataclass(frozen=True)
class CacheStatistics:
    """Counts of a cache, over all processes that share it; see `cached`.

    Attributes:
        hits: calls whose value was read from the cache.
        misses: calls that computed their value.
        stored: values that were stored.
        full: values that were not stored, because there was no room.
        busy: values that were not stored this time: another process was storing the same, or was stopped
            while it stored, or another thread drew from a global generator meanwhile.
        random: values that were not stored, because the function drew from a generator.
        refused: values that were not stored, because they cannot be pickled.
        damaged: values that could not be read, and were computed again.
        checked: hits whose value was computed again and compared.
        unchecked: hits whose value was computed again, and could not be compared.
        distrusted: calls that computed their value because an earlier hit was found to be wrong.
        unshared: objects with a method that was cached in its class, which were made in a worker.
        function: module and name of the function.
        bytes: size of the stored values, with what finds them.
        values: number of values in the cache.
        limit: largest value of `bytes`.

    >>> square = cached(lambda number: number * number, limit="1MB")
    >>> square(3), square(3)
    (9, 9)
    >>> statistics = square.statistics()
    >>> statistics.hits, statistics.misses, statistics.stored
    (1, 1, 1)
    """

    hits: int = 0
    misses: int = 0
    stored: int = 0
    full: int = 0
    busy: int = 0
    random: int = 0
    refused: int = 0
    damaged: int = 0
    checked: int = 0
    unchecked: int = 0
    distrusted: int = 0
    unshared: int = 0
    function: str = ""
    bytes: int = 0
    values: int = 0
    limit: int = 0


#: What is counted: all but the function, and what the storage says of itself.
NAMES = [field.name for field in fields(CacheStatistics)][:-4]
_INDEX = {name: at for at, name in enumerate([*NAMES, "hinted", "warned"])}


class CacheCounters(ctypes.Structure):
    """Counts of all processes that have the same memory: `from_buffer` of `NBYTES` writable bytes, or more.

    Every word is written at once, by itself. Of two processes that add to one word at the same time, one may
    get lost: then one hit more is checked.

    Attributes:
        is_marked: whether a hit was found to be wrong.
        since: when the last check was made, and paid for; in nanoseconds.
    """

    is_marked: int
    since: int
    _fields_ = (
        ("_counts", ctypes.c_uint64 * (_ROWS * _ROW_WORDS)),
        *((name, ctypes.c_uint64) for name in ("is_marked", "since")),
        ("_pairs", ctypes.c_uint64 * _PAIRS),
    )

    def enter(self) -> None:
        """Take the row of this process; a forked child has its parent's."""
        row = process_id.pid % _ROWS * _ROW_WORDS
        self._row = memoryview(self._counts).cast("B").cast("Q")[row : row + _ROW_WORDS]

    def add(self, name: str) -> None:
        self._row[_INDEX[name]] += 1

    def add_first(self, name: str) -> bool:
        """Whether no process has added to this counter before."""
        is_first = not self.sum(name)
        self.add(name)
        return is_first

    def sum(self, name: str) -> int:
        return sum(self._counts[_INDEX[name] :: _ROW_WORDS])

    def has(self, pair: int) -> bool:
        """Whether a worker number and a writer, as a hash that is not 0, were noted."""
        return bool(self._pairs[pair % _PAIRS] == pair)

    def note(self, pair: int) -> None:
        """Note a worker number and a writer, in the place of another pair if that has it."""
        self._pairs[pair % _PAIRS] = pair


#: Bytes of all of it.
NBYTES = ctypes.sizeof(CacheCounters)
