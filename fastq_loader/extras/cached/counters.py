"""The counters of a cache, and what its processes know of its hits: the first bytes of its memory.

Runs in every process that calls a cached function. Each process adds to its own row. Two processes whose ids
are equal in their last bits share one, and may lose a count when both add at once.

    rows      counts, one row for a process
    words     see `_word`
    checks    a table of hashes: which worker numbers have checked a hit on the values of which writer
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from fastq_loader.system import process_id

_ROW_WORDS, _ROWS = 16, 2048
_WORDS = _ROWS * _ROW_WORDS
_CHECKS, _CHECK_WORDS = _WORDS + 8, 4096
#: Bytes of all of it.
NBYTES = (_CHECKS + _CHECK_WORDS) * 8 + (-(_CHECKS + _CHECK_WORDS) * 8) % 4096
#: Words of the table that are looked at for one hash.
_PROBES = 16


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
        checked: hits whose value was computed again and compared.
        unchecked: hits whose value was computed again, and could not be compared.
        distrusted: calls that computed their value because an earlier hit was found to be wrong.
        unshared: objects with a method that was cached in its class, which a worker alone has: the loader did
            not find them in its dataset.
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
    checked: int = 0
    unchecked: int = 0
    distrusted: int = 0
    unshared: int = 0
    function: str = ""
    values: int = 0
    limit: int = 0


NAMES = [
    field.name
    for field in fields(CacheStatistics)
    if field.name not in ("function", "bytes", "values", "limit")
]
_INDEX = {name: at for at, name in enumerate([*NAMES, "hinted", "warned"])}


def _word(at: int, text: str) -> property:
    """A word that all processes read and write."""

    def get(self: CacheCounters) -> int:
        return int(self._words[at])

    def set_(self: CacheCounters, value: int) -> None:
        self._words[at] = value

    return property(get, set_, doc=text)


class CacheCounters:
    """Counts of all processes that have the same memory.

    Every word is written at once, by itself. Of two processes that add to one word at the same time, one may
    get lost: then one hit more is checked.

    Args:
        memory: `NBYTES` writable bytes, or more.
    """

    is_marked = _word(_WORDS, "Whether a hit was found to be wrong.")
    first = _word(_WORDS + 1, "How many of the first hits were checked.")
    since = _word(_WORDS + 2, "When the last check was made, and paid for; in nanoseconds.")

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
        is_first = not self.sum(name)
        self.add(name)
        return is_first

    def sum(self, name: str) -> int:
        return sum(self._words[_INDEX[name] : _WORDS : _ROW_WORDS])

    def has(self, pair: int) -> bool:
        """Whether a worker number and a writer, as a hash that is not 0, were noted."""
        return any(self._words[at] == pair for at in self._slots(pair))

    def note(self, pair: int) -> None:
        """Note a worker number and a writer. A full part of the table begins anew."""
        slots = self._slots(pair)
        self._words[next((at for at in slots if self._words[at] in (0, pair)), slots[0])] = pair

    def _slots(self, pair: int) -> list[int]:
        return [_CHECKS + (pair + number) % _CHECK_WORDS for number in range(_PROBES)]
