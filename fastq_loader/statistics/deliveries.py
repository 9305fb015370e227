"""How far the workers of an epoch were ahead of the deliveries, and which batches were late.

Pure: folded from the records of the epoch's calls, see `epoch`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastq_loader.statistics.snapshots import LateBatch

if TYPE_CHECKING:
    from fastq_loader.ipc.messages import Answer

#: Parts of an epoch for which ready batches are counted, and their initial width in nanoseconds.
_PARTS, _WIDTH = 64, 1 << 24
#: Batches that `statistics()` names as late.
_LATE = 10


class ReadyCounts:
    """The number of batches that were loaded and not delivered, in each part of an epoch.

    Args:
        began: when `iter()` was called.
    """

    def __init__(self, began: int) -> None:
        self._began = began
        self._parts = [0]  # nanoseconds in which batches were ready, summed over the batches
        self._width = _WIDTH

    def add(self, since: int, now: int) -> None:
        """Count a batch that is delivered now, and was ready since then."""
        begin, end = since - self._began, now - self._began
        if begin < 0:
            begin = 0
        elif begin > end:  # all processes should have the same clock
            begin = end
        while end >= _PARTS * self._width:
            pairs = zip(self._parts[::2], [*self._parts[1::2], 0], strict=False)
            self._parts, self._width = list(map(sum, pairs)), 2 * self._width
        width, parts = self._width, self._parts
        first, last = begin // width, end // width
        while last >= len(parts):
            parts.append(0)
        for part in range(first, last + 1):
            parts[part] += width
        parts[first] -= begin - first * width
        parts[last] -= (last + 1) * width - end

    def averages(self, nanoseconds: Callable[[], int]) -> tuple[float, ...]:
        """The average number in each part of an epoch that took so long. May be called on any thread, so the
        counts, which grow with the duration, are read before it."""
        parts, width = list(self._parts), self._width
        widths = [width] * (len(parts) - 1)
        widths.append(max(1, nanoseconds() - sum(widths)))
        return tuple(round(part / width, 2) for part, width in zip(parts, widths, strict=True))


class LateBatches:
    """The batches of an epoch that held up others.

    Attributes:
        waiting: batches that hold up others → their indices, and for how many nanoseconds.
    """

    def __init__(self, epoch: int) -> None:
        self._epoch = epoch
        self.waiting: dict[int, tuple[Any, int]] = {}
        self._kept: list[LateBatch] = []

    def held_up(self, seq: int, index: Any, nanoseconds: int) -> None:
        """Count a wait for a batch while others were ready."""
        _, before = self.waiting.get(seq, (None, 0))
        self.waiting[seq] = index, before + nanoseconds

    def delivered(self, answer: Answer) -> None:
        """Complete the entry of a batch that held up others."""
        _, nanoseconds = self.waiting.pop(answer.seq)
        self.keep(
            LateBatch(
                self._epoch,
                answer.seq,
                seconds=nanoseconds / 1e9,
                load_seconds=(answer.finished - answer.started) / 1e9,
            )
        )

    def keep(self, late: LateBatch) -> None:
        """Add an entry."""
        self._kept.append(late)
        if len(self._kept) > 2 * _LATE:
            self._kept = _worst(self._kept)

    def worst(self) -> list[LateBatch]:
        """The batches that held up others longest, the worst first. May be called on any thread."""
        waiting = list(self.waiting.items())
        return _worst([*self._kept, *(LateBatch(self._epoch, seq, ns / 1e9) for seq, (_, ns) in waiting)])


def _worst(late: list[LateBatch]) -> list[LateBatch]:
    return sorted(late, key=lambda each: -each.seconds)[:_LATE]
