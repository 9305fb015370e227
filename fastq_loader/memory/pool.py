"""The blocks of one pool of workers: the ledger with the memory behind it.

Pure but for what the arena does. Runs in the consumer, on the thread that calls `next()`. A block is granted
to a task, accepted with the batch that a worker has written to it, and delivered to the user or dropped;
`collect` hears of the leases that have died. All ways back to a free block begin here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fastq_loader.memory.blocks import Extents
from fastq_loader.memory.ledger import BlockLedger

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Arena


class BlockPool(BlockLedger):
    """The shared memory of one pool of workers.

    Args:
        arena: the memory. The pool gives it back in `close`.
        workers: how many write to it.

    Attributes:
        released: what `collect` looks at, if anything.
    """

    def __init__(self, arena: Arena, workers: int) -> None:
        super().__init__()
        self.arena = arena
        self.released = arena.released
        self._workers = workers

    def collect(self) -> None:
        """Blocks whose last view has died are free again."""
        self.release(self.arena.released_blocks())

    def trim(self, batches: int, forget: Callable[[int], None] | None = None) -> bool:
        """Give the pages of free blocks that `batches` batches do not need back to the system.

        Args:
            batches: for which blocks stay.
            forget: called with the offset of each block before its pages go: a device that has locked them
                must not go on to read them.

        Returns:
            Whether there is new `space` to tell workers of.
        """
        trimmed = self.take_spare(batches)
        for offset, size in trimmed:
            if forget is not None:
                forget(offset)
            self.arena.mapping.punch(offset, size)
        return bool(trimmed)

    def clear_space(self, worker: int) -> Extents:
        """The ranges (offset, size) of a dead worker's part of the arena in which its successor may make
        blocks. Pages that the dead one wrote there go back to the system."""
        space = self.forget_space(worker, *self.arena.mapping.region(worker))
        for offset, size in space:
            self.arena.mapping.punch(offset, size)
        return space

    def usage(self) -> tuple[int, int, int]:
        """Blocks in use, blocks free, and bytes of shared memory behind them. May be asked on any thread."""
        free = self.free_blocks
        return len(self) - free, free, self.nbytes

    def close(self) -> None:
        """All workers have ended: give the memory back, but for the blocks that users reference. May be
        called again when an interrupt cut it short."""
        if not self.arena.retired:
            self.collect()
            for worker in range(self._workers):
                self.mark_dead(worker)
        self.arena.retire(self.held())
