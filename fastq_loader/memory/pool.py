"""The blocks of one pool of workers: the arena and its ledger, and the only calls that change either.

Pure but for what the arena does. Runs in the consumer, on the thread that calls `next()`. A block is granted
to a task, accepted with the batch that a worker has written to it, and delivered to the user or dropped;
`collect` hears of the leases that have died. All ways back to a free block begin here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from fastq_loader.memory.blocks import Extents
from fastq_loader.memory.ledger import BlockLedger

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Arena


class BlockPool:
    """The shared memory of one pool of workers.

    Args:
        arena: the memory. The pool gives it back in `close`.
        workers: how many write to it.

    Attributes:
        released: what `collect` looks at, if anything.
    """

    def __init__(self, arena: Arena, workers: int) -> None:
        self.arena = arena
        self._workers = workers
        self.released = arena.released
        self._ledger = BlockLedger(arena.mapping.region)
        self.grant = self._ledger.grant
        self.accept = self._ledger.accept
        self.give_back = self._ledger.give_back
        self.hand_over = self._ledger.hand_over
        self.deliver = self._ledger.deliver
        self.block_at = self._ledger.block_at

    # ---- the way back -------------------------------------------------------------------------

    def drop(self, offsets: Iterable[int]) -> None:
        """The batch in these blocks is not handed out, or was copied out of them."""
        for offset in offsets:
            self._ledger.drop(offset)

    def collect(self) -> None:
        """Blocks whose last view has died are free again."""
        self._ledger.release(self.arena.released_blocks())

    def mark_dead(self, worker: int) -> None:
        """A worker has ended: what was granted to it can be granted again."""
        self._ledger.writer_dead(worker)

    def trim(self, batches: int, forget: Callable[[int], None] | None = None) -> bool:
        """Give the pages of free blocks that `batches` batches do not need back to the system.

        Args:
            batches: for which blocks stay.
            forget: called with the offset of each block before its pages go: a device that has locked them
                must not go on to read them.

        Returns:
            Whether there is new `space` to tell workers of.
        """
        trimmed = self._ledger.trim(batches)
        for offset, size in trimmed:
            if forget is not None:
                forget(offset)
            self.arena.mapping.punch(offset, size)
        return bool(trimmed)

    # ---- address ranges -----------------------------------------------------------------------

    def space(self, worker: int) -> Extents:
        """Ranges (offset, size) of trimmed blocks in which `worker` may make new blocks; each once."""
        return self._ledger.space(worker)

    def clear_space(self, worker: int) -> Extents:
        """The ranges (offset, size) of a dead worker's part of the arena in which its successor may make
        blocks. Pages that the dead one wrote there go back to the system."""
        space = self._ledger.forget_space(worker, *self.arena.mapping.region(worker))
        for offset, size in space:
            self.arena.mapping.punch(offset, size)
        return space

    # ---- counts -------------------------------------------------------------------------------

    @property
    def grown(self) -> int:
        """Blocks that workers have made so far."""
        return self._ledger.grown

    @property
    def batch_bytes(self) -> float:
        """Bytes of a batch's blocks: a maximum that fades over some hundred batches."""
        return self._ledger.batch_bytes

    def usage(self) -> tuple[int, int, int]:
        """Blocks in use, blocks free, and bytes of shared memory behind them. May be asked on any thread."""
        free = self._ledger.free_blocks
        return len(self._ledger) - free, free, self._ledger.nbytes

    def filled(self) -> list[int]:
        """Offsets of the blocks of batches that wait to be delivered, ascending."""
        return self._ledger.filled()

    def check(self) -> None:
        """Raise AssertionError unless the ledger agrees with itself."""
        self._ledger.check()

    # ---- the end ------------------------------------------------------------------------------

    def close(self) -> None:
        """All workers have ended: give the memory back, but for the blocks that users reference. May be
        called again when an interrupt cut it short."""
        if not self.arena.retired:
            self.collect()
            for worker in range(self._workers):
                self._ledger.writer_dead(worker)
        self.arena.retire(self._ledger.held())
