"""The counters of a cache, of all processes that call it: the first bytes of its memory.

Runs in every process that calls a cached function. Each process adds to its own row. Two processes whose ids
are equal in their last bits share one, and may lose a count when both add at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastq_loader.system import process_id

NAMES = "hits", "misses", "stored", "full", "busy", "random", "refused", "damaged"
_INDEX = {name: at for at, name in enumerate((*NAMES, "hinted"))}
_ROW_WORDS, _ROWS = 16, 2048
#: Bytes of the counters.
NBYTES = _ROWS * _ROW_WORDS * 8


@dataclass(frozen=True)
class CacheStatistics:
    """Counts of a cache, over all processes that share it; see `cached`.

    Attributes:
        hits: calls whose value was read from the cache.
        misses: calls that computed their value.
        stored: values that were stored.
        bytes: size of the stored values; with `path=`, of the file, which LMDB fills page by page.
        full: values that were not stored, because there was no room.
        busy: values that were not stored this time: another process was storing the same, or was stopped
            while it stored, or another thread drew from a global generator meanwhile.
        random: values that were not stored, because the function drew from a generator.
        refused: values that were not stored, because they cannot be pickled.
        damaged: values that could not be read, and were computed again.
        function: module and name of the function.
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
    bytes: int = 0
    full: int = 0
    busy: int = 0
    random: int = 0
    refused: int = 0
    damaged: int = 0
    function: str = ""
    values: int = 0
    limit: int = 0


class Counters:
    """Counts of all processes that have the same memory.

    Args:
        memory: `NBYTES` writable bytes, or more.
    """

    def __init__(self, memory: Any) -> None:
        self._words = memoryview(memory)[:NBYTES].cast("Q")
        self.enter()

    def enter(self) -> None:
        """Take the row of this process; a forked child has its parent's."""
        at = process_id.pid % _ROWS * _ROW_WORDS
        self._row = self._words[at : at + _ROW_WORDS]

    def add(self, name: str) -> None:
        self._row[_INDEX[name]] += 1

    def add_first(self, name: str) -> bool:
        """Whether no process has added to this counter before."""
        is_first = not self._sum(name)
        self.add(name)
        return is_first

    def _sum(self, name: str) -> int:
        return sum(self._words[_INDEX[name] :: _ROW_WORDS])

    def sums(self) -> dict[str, int]:
        return {name: self._sum(name) for name in NAMES}
