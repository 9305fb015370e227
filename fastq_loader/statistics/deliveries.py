"""How far the workers of an epoch were ahead of the deliveries, and which batches were late.

Pure: folded from the records of the epoch's calls, see `epoch`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from fastq_loader.ipc.messages import decode_index
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
        # For each part of the epoch: the change in the number of ready batches, and the nanoseconds from each
        # change to the end of the part, summed; negative for a delivery.
        self._changes, self._rests = [0], [0]
        self._width = _WIDTH

    def add(self, since: int, now: int) -> None:
        """Count a batch that is delivered now, and was ready since then."""
        begin, end = since - self._began, now - self._began
        if begin < 0:
            begin = 0
        elif begin > end:  # all processes should have the same clock
            begin = end
        while end >= _PARTS * self._width:
            self._double_width()
        width, changes, rests = self._width, self._changes, self._rests
        last, part = end // width, begin // width
        while last >= len(changes):
            changes.append(0)
            rests.append(0)
        changes[part] += 1
        rests[part] += (part + 1) * width - begin
        changes[last] -= 1
        rests[last] -= (last + 1) * width - end

    def _double_width(self) -> None:
        width, changes, rests = self._width, [*self._changes, 0], [*self._rests, 0]
        firsts = range(0, len(self._changes), 2)
        self._rests = [rests[at] + changes[at] * width + rests[at + 1] for at in firsts]
        self._changes = [changes[at] + changes[at + 1] for at in firsts]
        self._width = 2 * width

    def averages(self, nanoseconds: int) -> tuple[float, ...]:
        """The average number in each part of an epoch that took so long. May be called on any thread, so it
        reads growing data only once."""
        width, changes, rests = self._width, list(self._changes), list(self._rests)
        before = accumulate(changes, initial=0)
        ready = [count * width + rest for count, rest in zip(before, rests, strict=False)]
        widths = [width] * (len(ready) - 1)
        widths.append(max(1, nanoseconds - sum(widths)))
        return tuple(round(each / width, 2) for each, width in zip(ready, widths, strict=True))


class LateBatches:
    """The batches that held up others.

    Attributes:
        indices: batches that hold up others, and were not delivered → their indices.
    """

    def __init__(self) -> None:
        self.indices: dict[int, Any] = {}
        self._kept: dict[tuple[int | None, int], LateBatch] = {}

    def held_up(self, epoch: int, seq: int, index: Any, nanoseconds: int) -> None:
        """Count a wait for a batch while others were ready."""
        late = self._kept.get((epoch, seq), LateBatch(epoch, seq, 0.0))
        self.keep(replace(late, seconds=late.seconds + nanoseconds / 1e9))
        self.indices[seq] = index

    def delivered(self, epoch: int, answer: Answer) -> None:
        """Complete the entry of a batch that held up others, from its answer and its index."""
        index = decode_index(self.indices.pop(answer.seq))
        if (late := self._kept.get((epoch, answer.seq))) is not None:
            timed = answer.slowest and type(index) is list and answer.slowest_at < len(index)
            self.keep(
                replace(
                    late,
                    load_seconds=(answer.finished - answer.started) / 1e9,
                    sample=index[answer.slowest_at] if timed else None,
                    sample_seconds=answer.slowest / 1e9,
                )
            )

    def keep(self, late: LateBatch) -> None:
        """Add an entry, or replace it; the least late ones are dropped."""
        self._kept[late.epoch, late.batch] = late
        if len(self._kept) > 2 * _LATE:
            self._kept = {(each.epoch, each.batch): each for each in self.worst()}

    def worst(self) -> list[LateBatch]:
        """The batches that held up others longest, the worst first."""
        return sorted(self._kept.values(), key=lambda late: -late.seconds)[:_LATE]
