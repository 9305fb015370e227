"""The counters of a cache, of all processes that call it: the first bytes of its memory.

Runs in every process that calls a cached function. Each process adds to its own row. Two processes whose ids
are equal in their last bits share one, and may lose a count when both add at once.
"""

from __future__ import annotations

from typing import Any

from fastq_loader.system import process_id

NAMES = "hits", "misses", "stored", "full", "busy", "random", "refused", "damaged"
_INDEX = {name: at for at, name in enumerate((*NAMES, "hinted"))}
_ROW_WORDS, _ROWS = 16, 2048
#: Bytes of the counters.
NBYTES = _ROWS * _ROW_WORDS * 8


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
