"""One block of shared memory: its states, its sizes, its writer, and the ranges for new blocks.

Pure. Used in the consumer by the pool, in workers by the allocator, and for the sizes on both sides.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

FREE, GRANTED, FILLED, HELD = "free", "granted", "filled", "held"

#: state → event → next state. Any other transition is a defect and raises InvalidTransition.
BLOCK_TRANSITIONS: dict[str, dict[str, str]] = {
    FREE: {"grant": GRANTED},
    GRANTED: {"fill": FILLED, "give_back": FREE},
    FILLED: {"deliver": HELD, "drop": FREE},
    HELD: {"release": FREE},
}

PAGE = 4096
#: Alignment of fields in a batch that goes to a device in one piece, as in CUDA's own allocator.
DEVICE_ALIGNMENT = 256
#: Bytes. Smaller tensors and arrays travel together and are copied out, so keeping one does not keep a block.
SMALLEST = 64 * 1024


@lru_cache(1024)
def size_class(nbytes: int) -> int:
    """The block size for `nbytes`: four steps between powers of two, at least `SMALLEST`.

    At most a quarter of a block's address range stays unused; pages that were never written to cost no
    memory.
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = 1 << max((nbytes - 1).bit_length() - 3, 0)
    step = max(step, PAGE)
    return -(-nbytes // step) * step


def device_aligned(nbytes: int) -> int:
    """Bytes that a field of `nbytes` takes up in a batch that goes to a device."""
    return -(-nbytes // DEVICE_ALIGNMENT) * DEVICE_ALIGNMENT


Extents = tuple[tuple[int, int], ...]  # (offset, size in bytes)


class BlockOwner(NamedTuple):
    """The writer of a block: a worker, or whichever worker will claim a ticket.

    Attributes:
        worker: number of the worker, or None.
        ticket: ticket of an unclaimed task, or None.
    """

    worker: int | None
    ticket: int | None = None


class Block:
    """The current state of one block.

    Attributes:
        offset, size: in bytes.
        room: bytes of its address range: a small block may lie in the range of a larger one, which had lost
            its pages.
        state: by the table above.
        writer: the owner of the current grant, or of the last one.
        last_task: number of tasks at the time when it was last written to or held.
    """

    __slots__ = ("last_task", "offset", "room", "size", "state", "writer")

    def __init__(self, offset: int, size: int, room: int) -> None:
        self.offset = offset
        self.size = size
        self.room = room
        self.state = GRANTED
        self.writer = BlockOwner(None)
        self.last_task = 0


class FreeRanges:
    """The ranges (offset, size) of a worker's part of the arena in which it can make new blocks."""

    def __init__(self, ranges: Extents) -> None:
        self._ranges = list(ranges)

    def take(self, size: int) -> int | None:
        """Cut `size` bytes off the first range that is large enough. Return their offset, or None."""
        for at, (offset, room) in enumerate(self._ranges):
            if room >= size:
                self._ranges[at : at + 1] = [(offset + size, room - size)] if room > size else []
                return offset
        return None

    def free_ranges(self, ranges: Extents) -> None:
        """Put ranges back, and merge neighbours."""
        merged: list[tuple[int, int]] = []
        for offset, size in sorted([*self._ranges, *ranges]):
            if merged and sum(merged[-1]) == offset:
                merged[-1] = merged[-1][0], merged[-1][1] + size
            else:
                merged.append((offset, size))
        self._ranges = merged
