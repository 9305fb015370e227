"""The shared-memory blocks of one pool of workers: which are free, granted for writing, or referenced.

Pure, except for calls of the arena: it deals with offsets and sizes. Runs in the consumer, on the thread that
calls `next()`. The table in `blocks` defines the life of a block: it is granted to a task, accepted with the
batch that a worker has written to it, and delivered to the user or dropped; `collect` processes leases that
have died. No block is written to while anything references it: a block that is HELD can only be released,
and is FREE then.

A worker makes new blocks on its own when no granted block fits, in its own part of the arena's address range.
The pool adopts them with the answer. So no worker ever waits for space.

A task is granted what the largest of the last `RECENT` batches would need, and returns the rest. Free blocks
beyond that are *cold*: their pages go back to the system, but the pool keeps their address ranges, for later
blocks that fit into them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from fastq_loader.errors import InvalidTransition, ProtocolError, Transitions
from fastq_loader.memory.blocks import (
    BLOCK_TRANSITIONS,
    FREE,
    GRANTED,
    HELD,
    Block,
    BlockOwner,
    Extents,
    size_class,
)

if TYPE_CHECKING:
    from fastq_loader.memory.arena import Arena

_NEXT = Transitions("a block", BLOCK_TRANSITIONS)
_last_task = attrgetter("last_task")
#: Number of batches whose needs count, and number of tasks after which an unused block is cold in any case.
#: Making 200 MB of pages anew takes as long as a thousand of the smallest batches.
RECENT, PATIENCE = 32, 1000


class BlockPool:
    """All blocks of one arena, by state.

    Args:
        arena: the memory. The pool gives it back in `close`.

    Attributes:
        grown: number of blocks adopted so far.
        block_at: returns the block at an offset, or None.
        nbytes: bytes of all blocks.
        free_blocks: number of free blocks.
        wanted: sizes of blocks that suffice for any single one of the recent batches, in descending order.
        batch_bytes: bytes of the largest of these batches.
    """

    def __init__(self, arena: Arena) -> None:
        self.arena = arena
        self._blocks: dict[int, Block] = {}
        self.block_at = self._blocks.get
        self._free: dict[int, deque[int]] = {}  # size → offsets; last used at the right end
        self._sizes: list[int] = []  # sizes that have a free list, ascending
        self.grown = 0
        self.nbytes = 0
        self.free_blocks = 0
        self._cold: list[tuple[int, int]] = []  # ranges without pages (bytes, offset), ascending
        self.wanted: tuple[int, ...] = ()
        self.batch_bytes = 0
        self._tasks = 0
        self._needs: list[int] = []  # bytes of the newest batch in each block
        self._kind: tuple[int, ...] = ()  # sizes of blocks for it, descending
        self._kinds: dict[tuple[int, ...], int] = {}  # kinds of the recent batches → their last tasks

    def __len__(self) -> int:
        return len(self._blocks)

    # ---- the life of a block ------------------------------------------------------------------

    def _move(self, offset: int, event: str) -> Block:
        block = self._blocks[offset]
        before, state = block.state, _NEXT[block.state, event]
        block.state = state
        if before == FREE:
            self.free_blocks -= 1
        if state == FREE:
            self._free[block.size].append(offset)
            self.free_blocks += 1
        return block

    def grant(self, holder: BlockOwner) -> Extents:
        """Grant blocks for a batch like the recent ones, if there are any."""
        self._tasks += 1
        if not self.wanted:
            return ()
        grants: list[tuple[int, int]] = []
        for wanted in self.wanted:
            free = self._free.get(wanted)
            block = self._move(free.pop(), "grant") if free else self._take(wanted)
            if block is not None:
                block.writer = holder
                grants.append((block.offset, block.size))
        return tuple(grants)

    def _take(self, wanted: int) -> Block | None:
        # A block up to twice as large will do. With sizes that vary, a higher limit would let small batches
        # hold large blocks. A cold one has no pages.
        for size in self._sizes[bisect_left(self._sizes, wanted) : bisect_right(self._sizes, 2 * wanted)]:
            if self._free[size]:
                return self._move(self._free[size].pop(), "grant")
        at = bisect_left(self._cold, (wanted, 0))
        if at == len(self._cold):
            return None
        room, offset = self._cold.pop(at)
        return self._add(Block(offset, wanted, room))

    def accept(self, worker: int, used: Extents, fresh: Extents, returned: tuple[int, ...]) -> None:
        """Accept the batch that a worker has written.

        Args:
            worker: its number.
            used: the batch's blocks (offset, bytes needed).
            fresh: blocks (offset, size) that the worker made.
            returned: offsets of granted blocks that it did not use. If it neither used nor returned one, user
                code references it there, and it stays.

        Raises:
            ProtocolError: a block does not belong to the worker; nothing was changed.
        """
        self._check_own(worker, used, fresh, returned)
        for offset, size in fresh:
            self._add(Block(offset, size, size)).writer = BlockOwner(worker)
            self.grown += 1
        if returned:
            self.give_back(returned)
        for offset, _ in used:
            self._move(offset, "fill").last_task = self._tasks
        if used:
            needs = [need for _, need in used]
            if needs != self._needs:
                self._needs, self._kind = needs, tuple(sorted(map(size_class, needs), reverse=True))
            known = self._kind in self._kinds
            self._kinds[self._kind] = self._tasks
            if not known:
                self._want()

    def _want(self) -> None:
        """Compute the needs of the recent batches."""
        self.batch_bytes = max(map(sum, self._kinds), default=0)
        wanted: list[int] = []
        for kind in sorted(self._kinds, reverse=True):
            left = list(wanted)
            for size in kind:
                fitting = [other for other in left if size <= other <= 2 * size]
                if fitting:
                    left.remove(fitting[-1])
                else:
                    wanted.append(size)
            wanted.sort(reverse=True)
        self.wanted = tuple(wanted)

    def _check_own(self, worker: int, used: Extents, fresh: Extents, returned: tuple[int, ...]) -> None:
        named, made = [*[offset for offset, _ in used], *returned], {offset for offset, _ in fresh}
        if len({*named}) < len(named) or not made.isdisjoint(self._blocks):
            raise ProtocolError(f"worker {worker} names one block twice")
        for offset in named:
            if offset in made:
                continue
            block = self._blocks.get(offset)
            if block is None or block.writer != (worker, None):
                raise ProtocolError(f"worker {worker} has no grant for the block at {offset}")
            if block.state != GRANTED:
                raise ProtocolError(f"worker {worker} names the block at {offset}, which is {block.state}")

    def _add(self, block: Block) -> Block:
        self._blocks[block.offset] = block
        block.last_task = self._tasks
        if block.size not in self._free:
            self._free[block.size] = deque()
            insort(self._sizes, block.size)
        self.nbytes += block.size
        return block

    def deliver(self, offsets: Sequence[int]) -> None:
        """Deliver the batch in these blocks: its views hold leases."""
        for offset in offsets:
            self._move(offset, "deliver")

    def release(self, offsets: Iterable[int]) -> None:
        """Free blocks whose last views are gone."""
        for offset in offsets:
            self._move(offset, "release").last_task = self._tasks

    def collect(self) -> None:
        """Free the blocks whose last view has died."""
        self.release(self.arena.released_blocks())

    def drop(self, offsets: Iterable[int]) -> None:
        """Free the blocks of a batch that is not delivered, or was copied out of them."""
        for offset in offsets:
            self._move(offset, "drop")

    def give_back(self, offsets: Iterable[int]) -> None:
        """Take back unused grants."""
        for offset in offsets:
            self._move(offset, "give_back")

    def hand_over(self, holder: BlockOwner, worker: int, blocks: Extents) -> None:
        """Transfer grants from `holder`, a ticket, to the `worker` that has claimed it."""
        for offset, _ in blocks:
            block = self._blocks[offset]
            if block.writer != holder or block.state != GRANTED:
                raise InvalidTransition(f"block {offset} is {block.state}, and not {holder}'s to hand over")
            block.writer = BlockOwner(worker)

    def mark_dead(self, worker: int) -> None:
        """Take back the grants of `worker`, which is confirmed dead."""
        for offset, block in self._blocks.items():
            if block.state == GRANTED and block.writer == (worker, None):
                self._move(offset, "give_back")

    # ---- shrinking ----------------------------------------------------------------------------

    def trim(self, batches: int, forget: Callable[[int], None] | None = None) -> bool:
        """Give the pages of unneeded blocks back to the system.

        As many free blocks keep theirs as `batches` batches need, so that a loop that kept batches for a
        while returns their memory; blocks that were unused for many tasks lose them anyway.

        Args:
            batches: number of batches for which blocks stay.
            forget: called with the offset of each block before its pages go: a device that has locked them
                must not read them any more.

        Returns:
            Whether any block lost its pages: then there may be `space` to send to workers.
        """
        self.collect()  # also blocks that waited for a forked child to end
        recent = {kind: task for kind, task in self._kinds.items() if task > self._tasks - RECENT}
        if len(recent) < len(self._kinds):
            self._kinds = recent
            self._want()
        needed = batches * max(self.batch_bytes, sum(self.wanted))
        spare = sum([size * len(free) for size, free in self._free.items()]) - needed
        before = self.free_blocks
        for block in sorted(map(self._blocks.__getitem__, chain(*self._free.values())), key=_last_task):
            if block.size <= spare or block.last_task < self._tasks - PATIENCE:
                spare -= block.size
                self._cool(block, forget)
        return self.free_blocks < before

    def _cool(self, block: Block, forget: Callable[[int], None] | None) -> None:
        if forget is not None:
            forget(block.offset)
        self.arena.mapping.punch(block.offset, block.size)
        del self._blocks[block.offset]
        self._free[block.size].remove(block.offset)
        self.nbytes -= block.size
        self.free_blocks -= 1
        insort(self._cold, (block.room, block.offset))

    def space(self, worker: int) -> Extents:
        """Take the cold ranges (offset, size) out of a worker's part of the arena, if there are so many that
        it may lack room for larger blocks: it makes new blocks there."""
        start, end = self.arena.mapping.region(worker)
        cold = [(room, offset) for room, offset in self._cold if start <= offset < end]
        if sum(room for room, _ in cold) < (end - start) // 4:
            return ()
        self._cold = [each for each in self._cold if not start <= each[1] < end]
        return tuple((offset, room) for room, offset in cold)

    def clear_space(self, worker: int) -> Extents:
        """The ranges (offset, size) of a dead worker's part of the arena in which its successor may make
        blocks: everything outside of blocks. Pages that the dead worker wrote there go back to the system."""
        start, end = self.arena.mapping.region(worker)
        self._cold = [each for each in self._cold if not start <= each[1] < end]
        gaps = []
        for offset in sorted(offset for offset in self._blocks if start <= offset < end):
            gaps.append((start, offset - start))
            start = offset + self._blocks[offset].room
        space = tuple(gap for gap in [*gaps, (start, end - start)] if gap[1])
        for gap in space:
            self.arena.mapping.punch(*gap)
        return space

    def usage(self) -> tuple[int, int, int]:
        """Blocks in use, free blocks, and bytes of shared memory behind them. May be called on any thread."""
        free = self.free_blocks
        return len(self) - free, free, self.nbytes

    def close(self) -> None:
        """Give the memory back after all workers have ended, except blocks that users reference. May be
        called again after an interrupt."""
        if not self.arena.retired:
            self.collect()
        held = [block for block in self._blocks.values() if block.state == HELD]
        self.arena.retire([(block.offset, block.size) for block in held])
