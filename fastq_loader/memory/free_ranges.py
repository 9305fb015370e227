"""Where in its part of the arena a worker can make new blocks. Pure: it counts bytes."""

from __future__ import annotations

from bisect import bisect_left

from fastq_loader.memory.blocks import Extents


class FreeRanges:
    """The ranges of a worker's part of the arena in which it can make new blocks, ascending and apart."""

    def __init__(self, ranges: Extents) -> None:
        self._starts = [offset for offset, _ in ranges]
        self._ends = [offset + size for offset, size in ranges]

    def take(self, size: int) -> int | None:
        """Cut `size` bytes off the first range that has them; their offset, or None."""
        for at, (start, end) in enumerate(zip(self._starts, self._ends, strict=True)):
            if end - start >= size:
                if end - start == size:
                    del self._starts[at], self._ends[at]
                else:
                    self._starts[at] = start + size
                return start
        return None

    def give(self, offset: int, size: int) -> None:
        """Put a range back, and merge it with its neighbours."""
        at = bisect_left(self._starts, offset)
        end = offset + size
        if at < len(self._starts) and self._starts[at] == end:
            end = self._ends[at]
            del self._starts[at], self._ends[at]
        if at and self._ends[at - 1] == offset:
            self._ends[at - 1] = end
        else:
            self._starts.insert(at, offset)
            self._ends.insert(at, end)
